"""Experts that are each sharded over tensor-parallel ranks, and the split of tokens for those that
are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.parallel.sharding import even_range
from lightning_3d.parallel.tensor.collectives import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    split_to_region,
)
from lightning_3d.parallel.tensor.group import TensorParallel


class PartialSum:
    """Mixin for a module whose own parameters are sharded, so that its output is a part of a sum:
    experts, each sharded over the ranks (`moe_tp_experts`), and shared experts in one tensor per
    matrix (`all_reduce`).

    Gate and up are column parallel, down is row parallel: tokens (n, hidden) and their routing
    weights (n, k) are replicated and the output (n, hidden) is summed, by one all-reduce forward.
    Backward, one all-reduce of the gradient of the tokens and a small one of that of the weights,
    each of which multiplies a part of a sum; the router then sees its whole gradient on every rank.
    Llama 4's experts get tokens that are weighted already, and neither indices nor weights.
    """

    tp_context: TensorParallel

    def forward(self, hidden_states: Tensor, *routing: Tensor, **kwargs: Any) -> Tensor:
        group = self.tp_context.group
        inside = copy_to_region(hidden_states, group)
        routed = [_copied(one, group) for one in routing]
        named = {key: _copied(value, group) for key, value in kwargs.items()}
        partial = super().forward(inside, *routed, **named)  # type: ignore[misc]
        return reduce_from_region(partial, group)


def _copied(value: Any, group: Any) -> Any:
    return (
        copy_to_region(value, group)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


class SilentIdentity:
    """Mixin for an expert without weights that returns its tokens unchanged
    (`moe_identity_expert`), on every rank but the first.

    It returns zeros: the ranks' outputs are summed, and an expert that is not sharded must count
    once."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


class TokenParts:
    """Split of the tokens of a replicated tensor over the tensor-parallel ranks, and their gather:
    for experts that are held whole, so that no token is sent to them twice."""

    def __init__(self, context: TensorParallel) -> None:
        self._context = context

    def cut(self, x: Tensor) -> Tensor:
        """This rank's rows of `x`; the gradients of all rows are gathered, by one all-gather
        backward."""
        return split_to_region(x, self._context.group, dim=0, sizes=self._sizes(len(x)))

    def join(self, part: Tensor, rows: int) -> Tensor:
        """All `rows` rows, by one all-gather forward."""
        return gather_from_region(part, self._context.group, dim=0, sizes=self._sizes(rows))

    def _sizes(self, rows: int) -> list[int]:
        return [even_range(rows, self._context.size, rank)[1] for rank in range(self._context.size)]
