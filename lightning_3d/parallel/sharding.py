"""The shard of every parameter on a rank: one table per rank, keyed by the full parameter name.

Initialization, the tensor-parallel rewrite, the gradient norm and checkpoints all read this table,
so that a shard is defined in exactly one place. Everything here is arithmetic on shapes; only
`ShardSpec.cut` and `ShardSpec.paste` touch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Box:
    """A rectangle of the global tensor and its place in the local one. All three tuples have one
    entry per dimension."""

    global_offset: tuple[int, ...]
    local_offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def global_slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.global_offset, self.shape, strict=True)
        )

    def local_slices(self) -> tuple[slice, ...]:
        return tuple(
            slice(start, start + size)
            for start, size in zip(self.local_offset, self.shape, strict=True)
        )


@dataclass(frozen=True)
class ShardSpec:
    """This rank's shard of one parameter.

    Attributes:
        name: full parameter name, the same on every rank and in every layout.
        global_shape: shape of the parameter in an unsharded model.
        boxes: rectangles that tile the local tensor.
        tp_replicas: tensor-parallel coordinates that hold this very shard, this rank's included.
        tp_grad_sum: tensor-parallel coordinates over which gradients are partial and must be summed
            once a step; empty for none.
        pp_replicas: pipeline coordinates that hold the parameter (two for an embedding tied across
            stages); empty where there is no pipeline.
        tied_to: canonical name of the parameter that this one is tied to, when this one is a copy
            of it.
        expert: True if the parameter belongs to experts that are sharded over expert-parallel
            ranks. Its gradient and state are then shared by the ranks of the stage that have the
            same experts, whatever their tensor-parallel coordinate.
    """

    name: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    tp_replicas: tuple[int, ...] = (0,)
    tp_grad_sum: tuple[int, ...] = ()
    pp_replicas: tuple[int, ...] = ()
    tied_to: str | None = None
    expert: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor on this rank: the hull of its boxes."""
        return tuple(
            max(box.local_offset[dim] + box.shape[dim] for box in self.boxes)
            for dim in range(len(self.global_shape))
        )

    @property
    def is_cut(self) -> bool:
        """True if this rank holds less than the whole parameter."""
        return self.local_shape != self.global_shape

    def is_replicated(self, tp_size: int) -> bool:
        """True if every tensor-parallel rank holds the whole parameter."""
        return not self.is_cut and len(self.tp_replicas) == tp_size

    def is_uneven(self, tp_size: int) -> bool:
        """True if tensor-parallel ranks hold shards of different sizes, for example of a vocabulary
        that they do not divide."""
        if self.expert:
            return False
        shards = tp_size // len(self.tp_replicas)
        return prod(self.local_shape) * shards != prod(self.global_shape)

    def counts_in_norm(self, tp_index: int, pp_index: int) -> bool:
        """True if the rank at these coordinates adds this shard to a global sum, so that replicas
        count once.

        Always True for experts, because ranks with the same experts are data-parallel to each
        other.
        """
        if self.expert:
            return True
        first_stage = min(self.pp_replicas) if self.pp_replicas else pp_index
        return tp_index == min(self.tp_replicas) and pp_index == first_stage

    def cut(self, full: Tensor) -> Tensor:
        """Copy this rank's shard, of shape `local_shape`, out of the full tensor of shape
        `global_shape`."""
        if tuple(full.shape) != self.global_shape:
            raise ValueError(
                f"{self.name} has shape {tuple(full.shape)}, but its specification has"
                f" {self.global_shape}."
            )
        local = full.new_empty(self.local_shape)
        for box in self.boxes:
            local[box.local_slices()] = full[box.global_slices()]
        return local

    def paste(self, local: Tensor, full: Tensor) -> None:
        """Write this rank's shard into its place in `full`; the inverse of `cut`."""
        for box in self.boxes:
            full[box.global_slices()] = local[box.local_slices()]

    def renamed(self, name: str, *, tied_to: str | None = None) -> ShardSpec:
        return replace(self, name=name, tied_to=tied_to if tied_to is not None else self.tied_to)


@dataclass(frozen=True)
class OptimizerShard:
    """State that the optimizer of this rank keeps for one parameter.

    Attributes:
        name: full parameter name.
        start: first element, in the row-major flattening of the local parameter, of the range that
            the tensors cover; None when they cover all of it and have its shape.
        values: by key ("exp_avg"; "master" for float32 weights of a narrower parameter): the
            tensors themselves, one-dimensional where they are ranges. Tensors of shape () and
            numbers (a step count) belong to the whole parameter.
    """

    name: str
    start: int | None
    values: Mapping[str, Tensor | float]

    def to_host(self) -> OptimizerShard:
        """Return a copy whose tensors are in host memory."""
        moved = {
            k: value if isinstance(value, (int, float)) else value.detach().cpu()
            for k, value in self.values.items()
        }
        return replace(self, values=moved)


def replicated(
    name: str, shape: Sequence[int], tp_size: int, *, grad_sum: bool = False
) -> ShardSpec:
    """Specification of a parameter that every tensor-parallel rank holds whole; `grad_sum` when
    each sees only a part of its gradient."""
    everyone = tuple(range(tp_size))
    whole = Box((0,) * len(shape), (0,) * len(shape), tuple(shape))
    return ShardSpec(
        name,
        tuple(shape),
        (whole,),
        tp_replicas=everyone,
        tp_grad_sum=everyone if grad_sum and tp_size > 1 else (),
    )


def cut_along(
    name: str,
    shape: Sequence[int],
    dim: int,
    pieces: Sequence[tuple[int, int]],
    *,
    tp_replicas: tuple[int, ...],
    tp_grad_sum: tuple[int, ...] = (),
) -> ShardSpec:
    """Specification of a parameter whose shard is, in this order, the ranges `pieces` = (start,
    length) along dimension `dim`."""
    boxes = []
    filled = 0
    for start, length in pieces:
        global_offset = tuple(start if d == dim else 0 for d in range(len(shape)))
        local_offset = tuple(filled if d == dim else 0 for d in range(len(shape)))
        boxes.append(
            Box(
                global_offset,
                local_offset,
                tuple(length if d == dim else s for d, s in enumerate(shape)),
            )
        )
        filled += length
    return ShardSpec(
        name, tuple(shape), tuple(boxes), tp_replicas=tp_replicas, tp_grad_sum=tp_grad_sum
    )


def even_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """(start, length) of part `index` when `total` rows are split into runs of ceil(total / parts);
    the last runs may be shorter."""
    run = -(-total // parts)
    start = min(index * run, total)
    return start, min(run, total - start)


def reduction_groups(specs: Iterator[ShardSpec] | Sequence[ShardSpec]) -> list[tuple[int, ...]]:
    """The distinct tensor-parallel coordinate sets over which some parameter's gradient has to be
    summed, in a fixed order."""
    return sorted({spec.tp_grad_sum for spec in specs if len(spec.tp_grad_sum) > 1})
