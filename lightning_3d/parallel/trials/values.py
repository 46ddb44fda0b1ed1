"""Random values for trials. A matrix of any size takes little memory, and no two of its rows are
equal.

Equal rows hide what a trial looks for. They give every feature of a token the same value, which a
layer norm takes away, and of which an RMS norm leaves the sign. Equal matrices (of queries and
keys, of experts) hide which one was read.
"""

from __future__ import annotations

import hashlib
import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_3d.parallel.nested import tensors_of

LARGE = 2**18
"""Elements of a parameter above which `FewRows` repeats one row. A copy of a model with 30 blocks
then takes less than 1 GB."""

_FEW = 64
"""Rows of a matrix that is always drawn whole: the embeddings of a trial's token ids."""

_RANK = 8


def generator_of(name: str, seed: int = 0) -> torch.Generator:
    """Return a generator on the CPU whose numbers depend on a name and a seed only, on every
    rank."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def normal(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw normal numbers: what modules get as hidden states."""
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")


def draw(
    name: str, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Draw the values of a parameter, which depend on its name, its shape and the seed only.

    A matrix gets numbers of variance 1 / columns, so that activations keep their size and attention
    is not uniform. A vector gets numbers in 0.5 .. 1.5. An ordinary initialization hides faults:
    matrices and biases that are zero do not change the output.
    """
    generator = generator_of(name, seed)
    if len(shape) > 1:
        return normal(shape, generator, dtype) / max(shape[-1], 1) ** 0.5
    return 0.5 + torch.rand(shape, generator=generator, dtype=dtype, device="cpu")


class EqualRows(RuntimeError):
    """A module computes something with a large matrix for which `FewRows` has no matrix with rows
    that differ."""


class FewRows(TorchFunctionMode):
    """Draw parameters in little memory, and compute with them as a context: what one draws, only
    the same one computes with.

    A large matrix, or each matrix of a large stack, is one row, repeated. In the context it is a
    matrix of rank `_RANK` whose rows differ: random sums of that row, rotated. Products are written
    in many ways: as linear layers, `x @ weight.T`, `torch.addmm` (Conv1D of GPT-2), `torch.einsum`,
    one expert after the other, or in a batch. Whatever else is computed from such a matrix raises
    `EqualRows`.
    """

    def __init__(self) -> None:
        super().__init__()
        # by address, which stays theirs as long as they are here
        self._repeated: dict[int, Tensor] = {}
        self._shares: dict[int, Tensor] = {}  # by number of rows

    def draw(self, name: str, like: Tensor) -> Tensor:
        """Draw values of the shape of a parameter in float64; zeros for one of whole numbers. See
        `draw` of this file."""
        shape = tuple(like.shape)
        if not like.is_floating_point():
            return torch.zeros(shape, dtype=like.dtype, device="cpu")
        if like.numel() <= LARGE or like.ndim < 2 or (like.ndim == 2 and shape[0] <= _FEW):
            return draw(name, shape)
        return self._repeat(draw(name, (*shape[:-2], 1, shape[-1])), shape)

    def _repeat(self, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
        self._repeated[rows.untyped_storage().data_ptr()] = rows
        return rows.expand(shape)

    def _is_repeated(self, matrix: Tensor) -> bool:
        """Return whether a tensor is a view of repeated rows along one of its last two
        dimensions."""
        return (
            matrix.ndim >= 2
            and 0 in matrix.stride()[-2:]
            and matrix.untyped_storage().data_ptr() in self._repeated
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = kwargs or {}
        if not any(map(self._is_repeated, tensors_of((args, more)))):
            return func(*args, **more)
        if func in _PRODUCTS and (result := self._product(func, *args, **more)) is not None:
            return result
        if func is Tensor.__getitem__ and (chosen := self._rows(*args)) is not None:
            return chosen
        if func in _CONVERSIONS:
            return self._converted(func, args[0], *args[1:], **more)
        if func is torch.einsum and isinstance(args[0], str):
            return torch.einsum(*self._equation(*args))
        result = func(*args, **more)
        # a view, such as one expert or a transposed matrix, is as good
        if not all(map(self._is_repeated, tensors_of(result))):
            raise EqualRows(
                f"{getattr(func, '__name__', func)} of a matrix of more than {LARGE} elements"
            )
        return result

    def _product(self, func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """Multiply by a repeated matrix; None where that is not the last factor."""
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func is F.embedding:
            return self._embedded(*args, **kwargs)
        if func in _WITH_SUMMAND:
            return self._with_summand(*args, **kwargs)
        left, right = (*args, *kwargs.values())
        return self._times(left, right)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        product = self._times(input, weight.mT)
        return product if product is None or bias is None else product + bias

    def _embedded(self, input: Tensor, weight: Tensor, *options: Any, **more: Any) -> Tensor | None:
        return self._rows(weight, input)

    def _rows(self, matrix: Tensor, index: Any) -> Tensor | None:
        """Choose rows of a repeated matrix, such as embeddings or the biases of an expert; None for
        parts of another kind."""
        of_rows = self._is_repeated(matrix) and matrix.ndim == 2 and matrix.stride(0) == 0
        if not of_rows or not isinstance(index, (int, Tensor)):
            return None
        left, right = self._factors(matrix)
        return left[index] @ right

    def _with_summand(
        self, input: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor | None:
        product = self._times(left, right)
        return None if product is None else beta * input + alpha * product

    def _times(self, left: Tensor, right: Tensor) -> Tensor | None:
        """Multiply two factors, (..., n, inputs) and (..., inputs, outputs), one of which is
        repeated."""
        if self._is_repeated(left) == self._is_repeated(right):
            return None
        if self._is_repeated(right):
            first, second = self._factors(right)
            return left @ first @ second
        first, second = self._factors(left)
        return first @ (second @ right)

    def _converted(self, func: Any, matrix: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply a function of each element to one of the equal rows. Another tensor may be
        converted like the matrix."""
        if not self._is_repeated(matrix):
            converted: Tensor = func(matrix, *args, **kwargs)
            return converted
        dim = -2 if matrix.stride(-2) == 0 else -1
        return self._repeat(func(matrix.narrow(dim, 0, 1), *args, **kwargs), tuple(matrix.shape))

    def _equation(self, equation: str, *operands: Any) -> list[Any]:
        """Return the arguments of `torch.einsum` with two factors in the place of each repeated
        matrix."""
        tensors = operands[0] if isinstance(operands[0], (list, tuple)) else operands
        before, arrow, after = equation.replace(" ", "").partition("->")
        terms: list[str] = []
        found: list[Tensor] = []
        for term, tensor in zip(before.split(","), tensors, strict=True):
            if not self._is_repeated(tensor):
                terms.append(term)
                found.append(tensor)
                continue
            inner = next(
                letter
                for letter in string.ascii_uppercase
                if letter not in equation + "".join(terms)
            )
            first, second = self._factors(tensor)
            stacked = [term[-2] + inner, inner + term[-1]]
            of_stack = 0 if first.ndim > 2 else 1
            stacked[of_stack] = term[:-2] + stacked[of_stack]
            terms += stacked
            found += [first, second]
        return [",".join(terms) + arrow + after, *found]

    def _factors(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors (rows, rank) and (..., rank, columns) of the matrices for which
        repeated ones stand."""
        if matrix.stride(-2) != 0:
            left, right = self._factors(matrix.mT)
            return right.mT, left.mT
        row, rows = matrix[..., 0, :], matrix.shape[-2]
        rotated = torch.stack([row.roll(place, -1) for place in range(_RANK)], dim=-2)
        if rows not in self._shares:
            self._shares[rows] = draw("shares", (rows, _RANK))
        return self._shares[rows].to(row.dtype), rotated


_WITH_SUMMAND = frozenset({torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm})
_PRODUCTS = _WITH_SUMMAND | {F.linear, F.embedding, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_PRODUCTS |= {torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
_CONVERSIONS = frozenset(
    {
        Tensor.to,
        Tensor.type,
        Tensor.type_as,
        Tensor.float,
        Tensor.double,
        Tensor.contiguous,
        Tensor.clone,
    }
)
"""Functions of each element."""
