"""Resharding: the rectangular slices of whole tensors of the model that a rank holds, in any
layout. Views and shape arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from lightning_3d.parallel.sharding import Box, ShardSpec


@dataclass(frozen=True)
class Slices:
    """The slices of one tensor of the whole model that this rank holds.

    Attributes:
        shape: shape of the whole tensor.
        parts: offset in the whole tensor -> view of the slice.
        replica: True if other ranks hold the same elements, perhaps sliced differently, and save
            them instead of this rank.
    """

    shape: tuple[int, ...]
    parts: dict[tuple[int, ...], Tensor]
    replica: bool = False


def whole(tensor: Tensor) -> Slices:
    """Describe a tensor that this rank holds unsharded."""
    return Slices(tuple(tensor.shape), {(0,) * tensor.ndim: tensor.detach()})


def shard(local: Tensor, spec: ShardSpec) -> Slices:
    """Describe a parameter's shard, or a state of the same shape."""
    tensor = local.detach()
    return Slices(
        spec.global_shape, {box.global_offset: tensor[box.local_slices()] for box in spec.boxes}
    )


def flat_range(flat: Tensor, start: int, spec: ShardSpec, *, replica: bool = False) -> Slices:
    """Elements from `start` on of a shard's row-major flattening, as ZeRO shards them over
    data-parallel ranks.

    Args:
        flat: the elements, one-dimensional and contiguous.
        replica: see `Slices`.
    """
    parts = {}
    taken = 0
    for rectangle in rectangles(spec.local_shape, start, start + flat.numel()):
        view = flat.detach()[taken : taken + rectangle.numel].view(rectangle.shape)
        taken += rectangle.numel
        for box in spec.boxes:
            overlap = _overlap(rectangle, box)
            if overlap is not None:
                parts[overlap.global_offset] = view[overlap.local_slices()]
    return Slices(spec.global_shape, parts, replica)


def rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Split the elements [start, stop) of a row-major flattening into the few rectangles that they
    cover, in their order.

    Of each rectangle, only `global_offset` (its place in `shape`) and `shape` are set to useful
    values. There are at most 2 * len(shape) - 1 rectangles.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), (), ())
        return
    row = prod(shape[1:])
    index, before = divmod(start, row)
    if before or stop - start < row:  # begins or ends inside a row
        end = min(stop, (index + 1) * row)
        for inner in rectangles(shape[1:], before, end - index * row):
            yield _box((index, *inner.global_offset), (1, *inner.shape))
    else:
        rows = (stop - start) // row
        end = start + rows * row
        yield _box((index, *(0 for _ in shape[1:])), (rows, *shape[1:]))
    yield from rectangles(shape, end, stop)


def _box(offset: tuple[int, ...], shape: tuple[int, ...]) -> Box:
    return Box(offset, (0,) * len(shape), shape)


def overlap(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    other: tuple[int, ...],
    other_shape: tuple[int, ...],
) -> Box | None:
    """Intersect two rectangles of one tensor; None if they do not overlap. `local_offset` of the
    result is in the first of them."""
    return _overlap(Box(offset, (), shape), Box(other, other, other_shape))


def _overlap(rectangle: Box, box: Box) -> Box | None:
    """Intersect a rectangle of the local tensor with a box; None if they do not overlap.

    Of the result, `global_offset` is in the whole tensor and `local_offset` in the rectangle.
    """
    place = list(
        zip(rectangle.global_offset, rectangle.shape, box.local_offset, box.shape, strict=True)
    )
    starts = [max(at, box_at) for at, _, box_at, _ in place]
    sizes = [
        min(at + size, box_at + box_size) - max(at, box_at) for at, size, box_at, box_size in place
    ]
    if any(size <= 0 for size in sizes):
        return None
    moved = zip(starts, box.global_offset, box.local_offset, strict=True)
    return Box(
        tuple(start + in_whole - in_local for start, in_whole, in_local in moved),
        tuple(start - at for start, at in zip(starts, rectangle.global_offset, strict=True)),
        tuple(sizes),
    )
