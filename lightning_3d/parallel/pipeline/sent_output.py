"""What a stage keeps of an output that it has sent: its place in the graph, not its values.

The backward of a stage starts at its output with a gradient from the next stage. It needs the
values of the output only where an operation saved them (such as tanh), and then the graph itself
keeps them. (Megatron-LM's `deallocate_output_tensor` shrinks the output instead, and must know that
nothing else needs the values.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def graph_only(output: Tensor) -> Tensor:
    """Return a tensor without values that has the shape, the type and the gradient of `output`, but
    does not keep its storage alive.

    Args:
        output: (micro-batch, sequence, hidden), or packed; one that requires a gradient.

    Returns:
        Same shape. Its storage holds one number.
    """
    return _GraphOnly.apply(output)


class _GraphOnly(torch.autograd.Function):
    """The identity for gradients."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        # Not an expanded tensor: a split backward detaches it in place, which torch refuses for
        # views.
        return torch.empty_strided(
            output.shape, [0] * output.ndim, dtype=output.dtype, device=output.device
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
