"""Finds where the records of a layout and of one process differ by more than rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch
from torch import Tensor

from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.strategy.recorded.records import Piece, Records, State, same_values
from lightning_3d.strategy.recorded.whole_batches import joined

DATA, STEPS = "data", "number of batches"
START, LOSS, NORM, LOGGED, WEIGHTS, BUFFERS, OPTIMIZER = (
    "initial weights",
    "loss",
    "gradient norm",
    "logged value",
    "weight",
    "buffer",
    "optimizer state",
)

NOISE = 10
"""Factor by which differences may exceed the noise: the differences that weights changed in their
last bit make on one process. It is one sample of what rounding makes, and Adam turns the sign of a
gradient that is nearly zero into a whole step."""

_OUTLIERS = 0.01
"""Part of a weight's elements that may differ more where there is noise, for the same reason.
Optimizer states have no such steps."""

_SINGLE = {
    START: 1e-7,
    LOSS: 1e-5,
    NORM: 1e-5,
    LOGGED: 1e-5,
    WEIGHTS: 5e-5,
    BUFFERS: 1e-5,
    OPTIMIZER: 5e-4,
}
_DOUBLE = dict.fromkeys(_SINGLE, 1e-10)
_ABSOLUTE = (WEIGHTS,)
"""Compared by absolute differences: Adam divides by gradients, so that small weights have the same
differences as large ones."""
_PER_NAME = (LOGGED, BUFFERS)
_LEAST_SCALE = {LOSS: 1e-6, NORM: 1e-6, LOGGED: 1e-3}
_UNSTABLE = 0.1
"""Noise above which a logged value is not judged, for example a time."""
_LEAST_SHARE = 1e-3
"""Smallest scale of a state's tensor, as a part of the largest of its kind: where gradients are
zero except for rounding, all is noise."""


@dataclass(frozen=True)
class Difference:
    """One value that differs.

    Attributes:
        what: kind of the value.
        step: number of the batch, from 1; 0 before the first.
        name: of the value; empty where there is one of its kind.
        rank: rank that has it; None where all have.
        ours, theirs: the numbers of the layout and of one process where they differ most.
        size: the difference, relative unless the kind is compared absolutely.
        allowed: largest size that rounding explains.
    """

    what: str
    step: int
    name: str
    rank: int | None
    ours: float
    theirs: float
    size: float
    allowed: float

    @property
    def counts(self) -> bool:
        """Whether it is more than rounding."""
        return not self.size <= self.allowed  # NaN counts

    @property
    def how(self) -> str:
        return "absolute" if self.what in _ABSOLUTE else "relative"


@dataclass
class Comparison:
    """What differs between two runs.

    Attributes:
        found: differences that count, the first one first.
        largest: the largest difference of each kind, counting or not.
        other_rows: steps at which one process would have read other values than the ranks.
        misread: what the ranks read wrongly, in words; None where nothing shows that they do.
        losses, norms: (layout, one process) of each batch; the norm is NaN where further batches of
            the step follow.
    """

    found: list[Difference] = field(default_factory=list)
    largest: dict[str, Difference] = field(default_factory=dict)
    other_rows: list[int] = field(default_factory=list)
    misread: str | None = None
    losses: list[tuple[float, float]] = field(default_factory=list)
    norms: list[tuple[float, float]] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether rounding alone explains all differences."""
        return not self.found and self.misread is None

    @property
    def loss(self) -> float:
        """Largest relative difference of a loss."""
        return self._size(LOSS)

    @property
    def grad_norm(self) -> float:
        """Largest relative difference of a gradient norm."""
        return self._size(NORM)

    @property
    def weight(self) -> float:
        """Largest absolute difference of an element of a weight."""
        return self._size(WEIGHTS)

    def _size(self, what: str) -> float:
        return self.largest[what].size if what in self.largest else 0.0

    def __str__(self) -> str:
        return "\n".join(
            ["largest differences", *(_line(largest) for largest in self.largest.values())]
        )

    def add(self, difference: Difference) -> None:
        before = self.largest.get(difference.what)
        if before is None or _excess(difference) > _excess(before):
            self.largest[difference.what] = difference
        if difference.counts:
            self.found.append(difference)


def _line(largest: Difference) -> str:
    name = f", {largest.name}" if largest.name else ""
    why = (
        f" ({NOISE} times the effect of changing the last bit of the weights)"
        if largest.allowed > _SINGLE.get(largest.what, 1.0)
        else ""
    )
    return (
        f"  {largest.what:<16} {largest.size:9.2e}   allowed {largest.allowed:.0e}"
        f" {largest.how}{why}{name}"
    )


def _excess(difference: Difference) -> float:
    excess = difference.size / difference.allowed
    return float("inf") if isnan(excess) else excess


Raw = tuple[str, int, str, int | None, float, float, float, float]
"""what, step, name, rank, ours, theirs, size, size without outliers."""


def compare(
    ranks: Sequence[Records], one: Records, nudged: Records, facts: Mapping[str, Any]
) -> Comparison:
    """Compare a layout with one process.

    Args:
        ranks: records of the layout's ranks.
        one: records of one process.
        nudged: the same from weights that differ in their last bit: their differences from `one`
            are noise.
        facts: facts of the layout's run.
    """
    fixed = _DOUBLE if facts.get("precision") == "64-true" else _SINGLE
    noise: dict[tuple[str, str], float] = {}
    result = Comparison()
    _compare_data(ranks, one, nudged, facts, result)
    raised = iter(_differences([nudged], one))
    upcoming = next(raised, None)
    for what, step, name, rank, ours, theirs, size, most in _differences(ranks, one):
        # The noise of all steps up to this one counts.
        while upcoming is not None and upcoming[1] <= step:
            key = _noise_key(upcoming[0], upcoming[2])
            noise[key] = max(noise.get(key, 0.0), 0.0 if isnan(upcoming[6]) else upcoming[6])
            upcoming = next(raised, None)
        grown = noise.get(_noise_key(what, name), 0.0) if what != START else 0.0
        if what == LOGGED and grown > _UNSTABLE:
            continue
        counted = most if what == WEIGHTS and grown > fixed[what] else size
        result.add(
            Difference(
                what, step, name, rank, ours, theirs, counted, max(fixed[what], NOISE * grown)
            )
        )
    result.losses = list(zip(ranks[0].losses, one.losses, strict=False))
    result.norms = [
        (_or_nan(a), _or_nan(b)) for a, b in zip(ranks[0].norms, one.norms, strict=False)
    ]
    if len(ranks[0].losses) != len(one.losses):
        ours, theirs = float(len(ranks[0].losses)), float(len(one.losses))
        result.add(
            Difference(STEPS, int(min(ours, theirs)) + 1, "", None, ours, theirs, 1.0, 0.0 + 1e-9)
        )
    return result


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _noise_key(what: str, name: str) -> tuple[str, str]:
    return what, name if what in _PER_NAME else ""


def _differences(ranks: Sequence[Records], one: Records) -> Iterator[Raw]:
    """All differences, in the order in which a step makes them."""
    count = min(len(one.losses), *(len(rank.losses) for rank in ranks))
    yield from _states(START, 0, ranks, one, 0)
    yield from _buffers(0, ranks, one, 0)
    for index in range(count):
        step = index + 1
        yield from _numbers(
            LOSS, step, "", [rank.losses[index] for rank in ranks], one.losses[index]
        )
        if one.norms[index] is not None and all(rank.norms[index] is not None for rank in ranks):
            yield from _numbers(
                NORM, step, "", [rank.norms[index] for rank in ranks], one.norms[index]
            )
        yield from _logged(step, ranks, one, step)
        yield from _states(WEIGHTS, step, ranks, one, step)
        yield from _buffers(step, ranks, one, step)
        yield from _optimizer(step, ranks, one, step)


def _numbers(
    what: str, step: int, name: str, ours: Sequence[float | None], theirs: float | None
) -> Iterator[Raw]:
    assert theirs is not None
    scale = max(abs(theirs), _LEAST_SCALE[what])
    same = all(value == ours[0] for value in ours)
    for rank, value in enumerate(ours):
        assert value is not None
        size = (
            0.0
            if value == theirs or (isnan(value) and isnan(theirs))
            else abs(value - theirs) / scale
        )
        yield what, step, name, None if same else rank, value, theirs, size, size
        if same:
            return


def _logged(step: int, ranks: Sequence[Records], one: Records, index: int) -> Iterator[Raw]:
    if index >= len(one.states):
        return
    theirs = one.states[index].logged
    for name, value in theirs.items():
        ours = [rank.states[index].logged.get(name) for rank in ranks]
        if all(found is not None for found in ours):
            yield from _numbers(LOGGED, step, name, ours, value)


def _states(
    what: str, step: int, ranks: Sequence[Records], one: Records, index: int
) -> Iterator[Raw]:
    for rank, records in enumerate(ranks):
        for name, piece in records.states[index].weights.items():
            spec = records.specs.get(name)
            there = _found(one.states[index].weights, name, spec)
            if there is None:
                continue
            [ours], [theirs] = piece.values.values(), there.values.values()
            yield from _tensors(what, step, name, rank, ours, theirs, piece.start, spec, None)


def _optimizer(step: int, ranks: Sequence[Records], one: Records, index: int) -> Iterator[Raw]:
    scales = _largest_of_keys(one.states[index])
    for rank, records in enumerate(ranks):
        for name, piece in records.states[index].optimizer.items():
            spec = records.specs.get(name)
            there = _found(one.states[index].optimizer, name, spec)
            for key in piece.values.keys() & (there.values.keys() if there is not None else set()):
                assert there is not None
                ours, theirs, label = piece.values[key], there.values[key], f"{key} of {name}"
                least = scales.get(key, 0.0) * _LEAST_SHARE
                yield from _tensors(
                    OPTIMIZER, step, label, rank, ours, theirs, piece.start, spec, least
                )


def _largest_of_keys(state: State) -> dict[str, float]:
    scales: dict[str, float] = {}
    for piece in state.optimizer.values():
        for key, value in piece.values.items():
            if isinstance(value, Tensor) and value.numel():
                scales[key] = max(scales.get(key, 0.0), float(value.abs().max()))
    return scales


def _buffers(step: int, ranks: Sequence[Records], one: Records, index: int) -> Iterator[Raw]:
    for rank, records in enumerate(ranks):
        for name, ours in records.states[index].buffers.items():
            theirs = one.states[index].buffers.get(name)
            if theirs is not None and theirs.shape == ours.shape:
                yield from _tensors(BUFFERS, step, name, rank, ours, theirs, None, None, 1e-6)


def _found(pieces: Mapping[str, Piece], name: str, spec: ShardSpec | None) -> Piece | None:
    found = pieces.get(name)
    return found if found is not None or spec is None else pieces.get(spec.tied_to or spec.name)


def _tensors(
    what: str,
    step: int,
    name: str,
    rank: int,
    ours: Any,
    whole: Any,
    start: int | None,
    spec: ShardSpec | None,
    least: float | None,
) -> Iterator[Raw]:
    """Compare a rank's part of a tensor with the whole one. `least`: smallest scale of a relative
    difference."""
    ours, whole = torch.as_tensor(ours), torch.as_tensor(whole)
    theirs = _part(whole, ours, start, spec)
    if theirs is None or not ours.numel():
        return
    if start is not None:
        ours = ours.flatten()[: theirs.numel()]
    ours, theirs = ours.double(), theirs.double()
    gap = torch.where(
        (ours == theirs) | (ours.isnan() & theirs.isnan()), 0.0, (ours - theirs).abs()
    ).flatten()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    place = int(gap.argmax())
    scale = 1.0 if what in _ABSOLUTE else max(float(theirs.abs().max()), least or 1e-12)
    size = float(gap[place]) / scale
    most = (
        float(gap.kthvalue(max(1, int(gap.numel() * (1 - _OUTLIERS)))).values) / scale
        if what == WEIGHTS
        else size
    )
    yield (
        what,
        step,
        name,
        rank,
        float(ours.flatten()[place]),
        float(theirs.flatten()[place]),
        size,
        most,
    )


def _part(whole: Tensor, ours: Tensor, start: int | None, spec: ShardSpec | None) -> Tensor | None:
    """The part of a whole tensor that a rank has; None if they do not correspond, as for factored
    states."""
    if whole.ndim == 0 or ours.ndim == 0:
        return whole if whole.shape == ours.shape else None
    part = (
        spec.cut(whole) if spec is not None and tuple(whole.shape) == spec.global_shape else whole
    )
    if start is not None:
        return part.flatten()[start : start + ours.numel()]
    return part if part.shape == ours.shape else None


def _compare_data(
    ranks: Sequence[Records],
    one: Records,
    nudged: Records,
    facts: Mapping[str, Any],
    result: Comparison,
) -> None:
    """Note the steps at which one process would have read other values than the ranks have.

    That may be right: random numbers for samples, or a script that divides the data itself. It is
    wrong where several ranks read the same rows, where the ranks' loaders, which this strategy
    divides, give other samples, or where a single loader begins otherwise than in both runs of one
    process: before the first step, all have drawn the same random numbers.
    """
    readers = sorted((rank for rank in ranks if rank.batches), key=lambda rank: rank.data_index)
    divided = facts["loaders"] == len(readers)
    for index in range(min(len(one.batches), *(len(reader.batches) for reader in readers))):
        parts = [reader.batches[index] for reader in readers]
        whole = joined(parts, dict(facts))
        if whole is None or same_values(whole, one.batches[index]):
            continue
        result.other_rows.append(index + 1)
        if len(parts) > 1 and any(same_values(parts[0], part) for part in parts[1:]):
            result.misread = (
                result.misread
                or f"in step {index + 1}, several data-parallel ranks read the same rows"
            )
        if len(parts) == 1 and index == 0 and same_values(one.batches[0], nudged.batches[0]):
            result.misread = "in step 1, the ranks read other values than one process"
        theirs, ours = one.samples[index], [reader.samples[index] for reader in readers]
        if not divided or theirs is None or any(order is None for order in ours):
            continue
        if sorted(map(str, theirs)) != sorted(
            str(sample) for order in ours for sample in order or ()
        ):
            result.misread = (
                result.misread
                or f"in step {index + 1}, the ranks read other samples than one process"
            )
