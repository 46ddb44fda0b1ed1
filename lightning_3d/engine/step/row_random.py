"""Random numbers by row: each row of a part of a batch gets the numbers that it has in the whole
batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_SIZE = "size"
_NO_ROWS = ("randperm",)
"""Draws over all rows, of which no row has a part."""

Shape = tuple[int, ...]


class DrawnShapes(TorchDispatchMode):
    """Records the shape of everything that draws random numbers, in order.

    Attributes:
        shapes: for each draw.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Shape] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = _Call(func, args, kwargs or {})
        if given.draws:
            self.shapes.append(given.drawn)
        return func(*args, **given.kwargs)


class RowDraws(TorchDispatchMode):
    """Draws the random numbers of all rows of a batch, from the same generator, and takes those of
    some rows.

    A draw belongs to rows if its dimension 0 is as large as the number of rows, or a multiple of it
    (the rows are then outermost, as in flattened tokens). All other draws stay as they are, the
    same for all rows, and so do permutations.

    Args:
        rows: rows that this process computes; may have a step.
        total: rows of the batch.
        shapes: what `DrawnShapes` has recorded of the whole batch. It decides which draws belong to
            rows and in which dimension the rows are, also where shapes leave that open.

    Attributes:
        drawn: number of draws.
        unmatched: number of draws for which `shapes` has neither the same shape nor one with more
            rows.
    """

    def __init__(self, rows: slice, total: int, shapes: Sequence[Shape] | None = None) -> None:
        super().__init__()
        self._rows, self._total = rows, total
        self._own = len(range(total)[rows])
        self._shapes = shapes
        self.drawn = self.unmatched = 0
        # Rows of others have values, too, because probabilities must be valid. They are copies of
        # the own ones.
        places = torch.arange(total, device="cpu") % max(self._own, 1)
        places[rows] = torch.arange(self._own, device="cpu")
        self._places = places

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = _Call(func, args, kwargs or {})
        if not given.draws:
            return func(*args, **given.kwargs)
        shape, index = given.drawn, self.drawn
        self.drawn += 1
        dim = self._row_dimension(shape, index)
        if dim is None:
            return func(*args, **given.kwargs)
        many = self._enlarged(shape, dim)[dim]
        enlarged = given.changed(dim, shape[dim], many, partial(self._of_all_rows, dim=dim))
        result = func(*enlarged.args, **enlarged.kwargs)
        target = given.written
        if target is not None:
            target.copy_(self._of_own_rows(result, dim))
            return target
        if isinstance(result, Tensor):
            return self._of_own_rows(result, dim)
        return type(result)(
            self._of_own_rows(one, dim) if _size(one, dim) == many else one for one in result
        )

    def _row_dimension(self, shape: Shape, index: int) -> int | None:
        """Find the dimension of a draw that has the rows; None for a draw that all rows share."""
        if self._own in (0, self._total):
            return None
        if self._shapes is None:
            return 0 if shape and shape[0] and shape[0] % self._own == 0 else None
        whole = self._shapes[index] if index < len(self._shapes) else None
        if whole == shape:
            return None
        for dim, size in enumerate(shape):
            if size and size % self._own == 0 and self._enlarged(shape, dim) == whole:
                return dim
        self.unmatched += 1
        return None

    def _enlarged(self, shape: Shape, dim: int) -> Shape:
        return (*shape[:dim], shape[dim] // self._own * self._total, *shape[dim + 1 :])

    def _of_all_rows(self, own: Tensor, *, dim: int) -> Tensor:
        """Enlarge a tensor of own rows to all rows, in the same order of memory: that is the order
        in which elements are drawn."""
        every = (
            own.unflatten(dim, (self._own, -1))
            .index_select(dim, self._places.to(own.device))
            .flatten(dim, dim + 1)
        )
        if own.is_contiguous():  # strides of dimensions of size 1 say nothing
            return every
        order = sorted(
            range(own.ndim), key=lambda place: (own.stride(place), own.shape[place]), reverse=True
        )
        return torch.empty_permuted(every.shape, order, dtype=own.dtype, device=own.device).copy_(
            every
        )

    def _of_own_rows(self, every: Tensor, dim: int) -> Tensor:
        places = torch.arange(self._total, device="cpu")[self._rows].to(every.device)
        return (
            every.unflatten(dim, (self._total, -1)).index_select(dim, places).flatten(dim, dim + 1)
        )


class _Call:
    """One call of an operation of ATen.

    Attributes:
        draws: whether it draws random numbers.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.draws = torch.Tag.nondeterministic_seeded in func.tags and self._may_draw()

    def _may_draw(self) -> bool:
        name = self.func.overloadpacket.__name__
        if (
            name in _NO_ROWS
            or not self.func._schema.returns
            or self.func._schema.returns[0].type.kind() != "TensorType"
        ):
            return False
        return self._argument("dropout_p", 1.0) > 0.0

    def _argument(self, name: str, otherwise: Any) -> Any:
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                if place < len(self.args):
                    return self.args[place]
                return self.kwargs.get(name, argument.default_value)
        return otherwise

    @property
    def drawn(self) -> Shape:
        """Shape that is drawn: the one that is asked for, or that of the largest argument."""
        size = self._argument(_SIZE, None)
        if size is not None:
            return tuple(int(one) for one in size)
        tensors = (
            value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)
        )
        return tuple(max(tensors, key=Tensor.numel).shape)

    @property
    def written(self) -> Tensor | None:
        """The tensor that the operation writes into; None where it returns a new one."""
        return (
            self.args[0]
            if self.func._schema.is_mutable and isinstance(self.args[0], Tensor)
            else None
        )

    def changed(
        self, dim: int, before: int, after: int, enlarge: Callable[[Tensor], Tensor]
    ) -> _Call:
        """Return the call with arguments of size `after` in dimension `dim` where they had
        `before`."""

        def change(name: str, value: Any) -> Any:
            if name == _SIZE:
                return [*value[:dim], after, *value[dim + 1 :]]
            return enlarge(value) if _size(value, dim) == before else value

        names = [argument.name for argument in self.func._schema.arguments]
        args = tuple(change(name, value) for name, value in zip(names, self.args, strict=False))
        return _Call(
            self.func, args, {name: change(name, value) for name, value in self.kwargs.items()}
        )


def _size(value: Any, dim: int) -> int:
    return value.shape[dim] if isinstance(value, Tensor) and value.ndim > dim else 0
