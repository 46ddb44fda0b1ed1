"""`Layout`: the degree of each kind of parallelism, and the coordinates of each rank. Pure Python.

A layout is written `tp8_pp4_dp8`: axes in any order, each at most once; omitted axes are 1.

    tp  tensor parallel: shards each layer       pp  pipeline parallel: assigns layers to stages
    dp  data parallel: splits the batch          cp  context parallel: splits each sequence
    ep  expert parallel: uses the ranks of one pipeline stage, adds none
    vp  model chunks (stages) on each pipeline rank, adds none

The world has tp * cp * pp * dp ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import log2
from typing import Any

from lightning_3d.errors import LayoutError, listed

AXES = ("tp", "cp", "pp", "dp")
"""Axes that have ranks, in the default order, innermost first."""

DEGREES = ("tp", "pp", "dp", "cp", "ep", "vp")
"""Everything that a name can contain, in the order of canonical names."""

LARGEST_DEGREE = 2**20
"""More than ten times the ranks of the largest machines; anything above is a typing error."""

_ALIASES = {
    "mp": "tp",
    "tensor": "tp",
    "pipe": "pp",
    "pipeline": "pp",
    "ddp": "dp",
    "fsdp": "dp",
    "data": "dp",
    "context": "cp",
    "sp": "cp",
    "expert": "ep",
    "moe": "ep",
    "vpp": "vp",
    "virtual": "vp",
}
_WEIGHTS = {"cp": 8.0, "tp": 4.0, "pp": 2.0, "dp": 1.0}
"""Cost of changing an axis in `nearest_layouts`: a change of data parallelism affects the model
least."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and the order of ranks.

    Args:
        tp: degree of tensor parallelism, at least 1 like all degrees.
        pp: degree of pipeline parallelism.
        dp: degree of data parallelism.
        cp: degree of context parallelism.
        ep: degree of expert parallelism.
        vp: model chunks on each pipeline rank.
        order: axes with ranks, innermost (neighbouring ranks) first.

    Raises:
        LayoutError: a degree that is not a positive whole number, or an order that is not a
            permutation of the axes.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vp: int = 1
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        for axis in DEGREES:
            _check_degree(axis, getattr(self, axis))
        order = tuple(self.order)
        if sorted(map(str, order)) != sorted(AXES):
            raise LayoutError(
                f"The rank order [{', '.join(map(str, order))}] must contain each of {listed(AXES)}"
                f" exactly once, innermost first. The default is [{', '.join(AXES)}]."
            )
        object.__setattr__(self, "order", order)

    @classmethod
    def parse(cls, name: str, *, order: Sequence[str] | None = None) -> Layout:
        """Parse a name such as `tp8_pp4_dp8`.

        Raises:
            LayoutError: an empty name, an unknown or repeated axis, or a degree that is missing,
                below 1 or too large.
        """
        return cls(**_parse_degrees(name), order=AXES if order is None else tuple(order))

    @property
    def name(self) -> str:
        """Canonical name: axes in the order tp, pp, dp, cp, ep, vp, without those of degree 1;
        `tp1` when all are."""
        return (
            "_".join(f"{axis}{getattr(self, axis)}" for axis in DEGREES if getattr(self, axis) > 1)
            or "tp1"
        )

    def __str__(self) -> str:
        return self.name

    @property
    def world_size(self) -> int:
        """Number of ranks, tp * cp * pp * dp."""
        return self.tp * self.cp * self.pp * self.dp

    def size(self, axis: str) -> int:
        """Number of ranks along one of `AXES`."""
        _check_axes((axis,))
        return getattr(self, axis)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along each of `AXES`."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"There is no rank {rank} in {self}: its ranks are 0 to {self.world_size - 1}."
            )
        found = {}
        for axis in self.order:
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """Return the rank at these coordinates; an omitted axis is 0. The inverse of
        `coordinates`."""
        _check_axes(coordinates)
        rank = 0
        for axis in reversed(self.order):
            index = coordinates.get(axis, 0)
            if not 0 <= index < self.size(axis):
                raise LayoutError(
                    f"There is no {axis} index {index} in {self}: its {axis} indices are 0 to"
                    f" {self.size(axis) - 1}."
                )
            rank = rank * self.size(axis) + index
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks whose coordinates differ only along these axes.

        The groups are disjoint and cover the world. Ranks are in ascending order, so in a group of
        one axis they are ordered by their index along it. Groups are sorted by their first rank.
        """
        _check_axes(axes)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = self.coordinates(rank)
            found.setdefault(tuple(place[axis] for axis in AXES if axis not in axes), []).append(
                rank
            )
        return [tuple(group) for group in found.values()]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the group among `groups(*axes)` that contains this rank."""
        _check_axes(axes)
        place = self.coordinates(rank)
        varied = [axis for axis in AXES if axis in axes]
        indices = product(*(range(self.size(axis)) for axis in varied))
        return tuple(
            sorted(
                self.rank(**{**place, **dict(zip(varied, index, strict=True))}) for index in indices
            )
        )

    def expert_groups(self) -> list[tuple[int, ...]]:
        """Return all groups of `ep` ranks that share the experts of a stage.

        The ranks of a stage are numbered with tp innermost, then cp, then dp; each group has `ep`
        consecutive numbers. The groups list ranks in ascending order, and the position of a rank in
        its group determines its experts.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            place = at["tp"] + self.tp * (at["cp"] + self.cp * at["dp"])
            found.setdefault((at["pp"], place // self.ep), []).append(rank)
        return sorted(tuple(group) for group in found.values())

    def expert_data_groups(self) -> list[tuple[int, ...]]:
        """Return all groups of ranks of one stage that hold the same experts, with ranks in
        ascending order."""
        found: dict[tuple[int, int], list[int]] = {}
        for group in self.expert_groups():
            for index, rank in enumerate(group):
                found.setdefault((self.coordinates(rank)["pp"], index), []).append(rank)
        return sorted(tuple(sorted(group)) for group in found.values())

    def shard_groups(self, size: int) -> list[tuple[int, ...]]:
        """Return all groups of ranks of a stage that shard over `size` neighbouring data-parallel
        indices, with ranks in ascending order.

        Args:
            size: divisor of `dp`. All context-parallel ranks of an index are in its group.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault((at["pp"], at["tp"], at["dp"] // size), []).append(rank)
        return sorted(map(tuple, found.values()))

    def expert_shard_groups(self, size: int) -> list[tuple[int, ...]]:
        """Return all groups of ranks that hold the same experts and are in the same `shard_groups`,
        with ranks in ascending order.

        Args:
            size: divisor of `dp` such that `ep` divides size * cp * tp. So the ranks that share
                experts are not in two shard groups, and `replica_groups` are also those of experts.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for group in self.expert_data_groups():
            for rank in group:
                found.setdefault((group[0], self.coordinates(rank)["dp"] // size), []).append(rank)
        return sorted(map(tuple, found.values()))

    def replica_groups(self, size: int) -> list[tuple[int, ...]]:
        """Return all groups of ranks that hold the same shard: one rank of each of the
        `shard_groups` of a stage, in ascending order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            found.setdefault((at["pp"], at["tp"], at["cp"], at["dp"] % size), []).append(rank)
        return sorted(map(tuple, found.values()))

    def require_world_size(self, launched: int) -> None:
        """Refuse a number of launched ranks other than this layout's.

        Raises:
            LayoutError: the numbers differ; the message has both, and the nearest layouts that fit
                the launched ranks.
        """
        if launched == self.world_size:
            return
        factors = (
            " * ".join(f"{axis} {self.size(axis)}" for axis in AXES if self.size(axis) > 1)
            or "no axis above 1"
        )
        needs = f"Layout {self} needs {_ranks(self.world_size)} ({factors})"
        message = f"{needs}, but {launched} {_were(launched)} launched."
        near = nearest_layouts(self, launched)
        if near:
            message += (
                f" Layouts for {_ranks(launched)}:"
                f" {listed((layout.name for layout in near), last='or')}."
            )
        raise LayoutError(f"{message} Or launch {self.world_size}.")


def nearest_layouts(layout: Layout, world_size: int, limit: int = 3) -> list[Layout]:
    """Return layouts of `world_size` ranks, nearest first: those that keep cp and tp come before
    those that keep only pp or dp."""
    if world_size < 1:
        return []
    found = []
    for tp, cp, pp, dp in _factorizations(world_size, len(AXES)):
        found.append(replace(layout, tp=tp, cp=cp, pp=pp, dp=dp, vp=layout.vp if pp > 1 else 1))
    found = [new for new in found if new.ep == 1 or (new.dp * new.cp * new.tp) % new.ep == 0]
    return sorted(found, key=lambda new: (_distance(layout, new), new.name))[:limit]


def _distance(old: Layout, new: Layout) -> float:
    change = sum(
        weight * abs(log2(new.size(axis) / old.size(axis))) for axis, weight in _WEIGHTS.items()
    )
    # Penalize axes that were unused before: tp2_pp2 should not become a context-parallel layout.
    return change + 16.0 * sum(
        old.size(axis) == 1 < new.size(axis) for axis in _WEIGHTS if axis != "dp"
    )


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write a number as a product of `parts` factors."""
    if parts == 1:
        yield (number,)
        return
    for factor in divisors(number):
        for rest in _factorizations(number // factor, parts - 1):
            yield (factor, *rest)


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in ascending order."""
    small = [candidate for candidate in range(1, int(number**0.5) + 1) if number % candidate == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _check_axes(axes: Sequence[str] | dict[str, int]) -> None:
    for axis in axes:
        if axis not in AXES:
            raise LayoutError(
                f'"{axis}" is not an axis with ranks of its own. Such axes are {listed(AXES)}.'
            )


def _check_degree(axis: str, degree: object) -> None:
    if isinstance(degree, bool) or not isinstance(degree, int):
        raise LayoutError(
            f"The degree of {axis} must be a whole number; got {degree!r}. Omit {axis} for 1."
        )
    if degree < 1:
        raise LayoutError(
            f"The degree of {axis} must be at least 1; got {degree}. Omit {axis} for 1."
        )
    if degree > LARGEST_DEGREE:
        raise LayoutError(f"The degree of {axis} must be at most {LARGEST_DEGREE}; got {degree}.")


def _parse_degrees(name: str) -> dict[str, int]:
    if not isinstance(name, str) or not name.strip():
        raise LayoutError(
            'The layout name is empty. Use for example "tp2_pp2_dp2", or "tp1" for a single rank.'
        )
    degrees: dict[str, int] = {}
    for part in name.split("_"):
        match = re.fullmatch(r"([a-z]+)(-?[0-9]{1,12})", part)
        if match is None or match[1] not in DEGREES:
            raise LayoutError(_not_understood(name, part, match[1] if match else None))
        axis, degree = match[1], int(match[2])
        if axis in degrees:
            raise LayoutError(
                f'The layout "{name}" gives {axis} twice, as {degrees[axis]} and as {degree}. Each'
                f' axis may appear only once. Did you mean "{_without_repetition(name)}"?'
            )
        _check_degree(axis, degree)
        degrees[axis] = degree
    return degrees


def _not_understood(name: str, part: str, axis: str | None) -> str:
    if axis:
        what = f'has the unknown axis "{axis}"'
    elif part in DEGREES:
        what = f'gives no degree for "{part}"'
    elif len(part) > 60:
        what = f"has a part of {len(part)} characters"
    else:
        what = f'has the part "{part}", which is not an axis followed by a whole number'
    guess = _guess(name)
    question = f' Did you mean "{guess}"?' if guess else ' Use for example "tp2_pp2_dp2".'
    shown = name if len(name) <= 60 else f"{name[:57]}..."
    return (
        f'The layout "{shown}" {what}. The axes are {listed(DEGREES)}, joined by'
        f" underscores.{question}"
    )


def _guess(name: str) -> str | None:
    """Guess the intended layout: other separators, capitals, swapped letters, other words for an
    axis."""
    pairs = re.findall(r"([a-z]+)[\s=:]*([1-9][0-9]{0,5})", name.lower())
    degrees: dict[str, Any] = {}
    for word, degree in pairs:
        swapped = ["".join(letters) for letters in permutations(word)] if len(word) == 2 else []
        axis = next(
            (axis for axis in (word, _ALIASES.get(word), *swapped) if axis in DEGREES), None
        )
        if axis is None or axis in degrees:
            return None
        degrees[axis] = int(degree)
    return Layout(**degrees).name if degrees else None


def _without_repetition(name: str) -> str:
    """Return the name with only the last of each repeated axis."""
    last = {part.rstrip("-0123456789"): part for part in name.split("_")}
    return "_".join(last.values())


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _were(count: int) -> str:
    return "rank was" if count == 1 else "ranks were"
