"""Random matrices of any size that take little memory, for trials of modules and models with random
weights.

A large matrix is one row, repeated. Products with it are those of a matrix of rank 4 whose rows
differ (`FewRows`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LARGE = 2**22
"""Elements of a parameter above which all of its rows are one."""

_RANK = 4
_MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def random_values(parameter: Tensor) -> Tensor:
    """Draw float64 values of the shape of a parameter; zeros for one of whole numbers. All rows of
    a large matrix are one."""
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    generator = torch.Generator().manual_seed(parameter.ndim)
    shape = parameter.shape if parameter.numel() <= LARGE else parameter.shape[-1:]
    scale = max(parameter.shape[-1], 1) ** -0.5 if parameter.ndim > 1 else 1.0
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).expand(
        parameter.shape
    )


class FewRows(TorchFunctionMode):
    """Take a matrix that is one row, repeated, for one of rank `_RANK` whose rows differ: random
    sums of that row, rotated.

    Equal rows would hide what a trial looks for. They give every feature of a token the same value,
    which a layer norm takes away, and of which an RMS norm leaves the sign. Some models write a
    linear layer as `x @ weight.T`, and some scale its result in place.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shares: dict[int, Tensor] = {}  # by number of rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        if func is F.linear and len(args) > 1 and _repeats(args[1], dim=0):
            product = self._product(args[0], args[1][0], len(args[1]))
            bias = args[2] if len(args) > 2 else more.get("bias")
            return product if bias is None else product + bias
        if func in _MATMULS and len(args) > 1 and _repeats(args[1], dim=1):
            return self._product(args[0], args[1][:, 0], args[1].shape[1])
        return func(*args, **more)

    def _product(self, x: Tensor, row: Tensor, outputs: int) -> Tensor:
        """Multiply (..., inputs) by a matrix of `outputs` rows that is made from one row (inputs,):
        (..., outputs)."""
        rows = torch.stack([row.roll(place) for place in range(_RANK)])
        if outputs not in self._shares:
            generator = torch.Generator().manual_seed(outputs)
            self._shares[outputs] = (
                torch.randn(outputs, _RANK, generator=generator, dtype=torch.float64) / _RANK**0.5
            )
        return F.linear(F.linear(x, rows), self._shares[outputs].to(row.dtype))


def _repeats(matrix: Any, dim: int) -> bool:
    """Return whether a matrix is one vector, repeated along a dimension."""
    return isinstance(matrix, Tensor) and matrix.ndim == 2 and matrix.stride(dim) == 0
