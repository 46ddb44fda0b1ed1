"""Rules for global batch, micro-batch and number of micro-batches. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from lightning_3d.errors import LayoutError, listed
from lightning_3d.layout.batch_ramp import BatchRamp
from lightning_3d.layout.layout import Layout, divisors
from lightning_3d.layout.resolve import check_schedule
from lightning_3d.layout.schedules import (
    SCHEDULES,
    ScheduleInfo,
    default_schedule,
    find_schedule,
    predicted_bubble,
)
from lightning_3d.layout.sizes import check_sizes

GLOBAL_BATCH, MICRO_BATCH = "data.global_batch_size", "parallelism.micro_batch_size"
"""Keys of a configuration, for messages. Python's arguments have the same last part."""


def check_batch(
    layout: Layout, global_batch: int, micro_batch: int, schedule: str | None = None
) -> int:
    """Refuse a global batch that cannot be split into the micro-batches that the layout and the
    schedule need.

    Args:
        layout: resolved (`resolve_layout`).
        global_batch: rows of one optimizer step over all data-parallel ranks.
        micro_batch: rows that pass through the model at once.
        schedule: name; None for the default.

    Returns:
        Micro-batches of one optimizer step on each data-parallel rank.

    Raises:
        ConfigError: a size that is not a positive whole number.
        LayoutError: with the nearest global batches that work. Messages name the keys of a
            configuration.
    """
    check_sizes(**{GLOBAL_BATCH: global_batch, MICRO_BATCH: micro_batch})
    info = find_schedule(schedule) if schedule is not None else default_schedule(layout.vp)
    unit = micro_batch * layout.dp
    if global_batch % unit:
        near = [count * unit for count in _counts_around(layout, info, global_batch // unit)]
        works = (
            f"values that work are {listed(near)}"
            if len(near) > 1
            else f"value that works is {near[0]}"
        )
        raise LayoutError(
            f"{GLOBAL_BATCH}={global_batch} is not divisible by {MICRO_BATCH}={micro_batch} * dp"
            f" {layout.dp} = {unit}. The nearest {works}."
        )
    check_micro_batches(layout, info.name, global_batch // unit, micro_batch=micro_batch)
    return global_batch // unit


def _counts_around(layout: Layout, info: ScheduleInfo, below: int) -> list[int]:
    """Return the nearest numbers of micro-batches that the schedule accepts, up to `below` and
    above it."""
    pp, vp = layout.pp, layout.vp
    down = [count for count in info.nearest_micro_batches(pp, vp, below) if 0 < count <= below]
    up = [count for count in info.nearest_micro_batches(pp, vp, below + 1) if count > below]
    return [*down, *up]


def check_micro_batches(
    layout: Layout, schedule: str, micro_batches: int, *, micro_batch: int | None = None
) -> None:
    """Refuse a number of micro-batches that the schedule cannot run.

    Args:
        layout: resolved (`resolve_layout`).
        micro_batches: of one optimizer step on each data-parallel rank.
        micro_batch: rows of one; where given, the message suggests global batches.

    Raises:
        LayoutError: with the nearest numbers, and the schedules that take this one.
    """
    info = check_schedule(layout, schedule)
    pp, vp = layout.pp, layout.vp
    if info.accepts(pp, vp, micro_batches):
        return
    least = info.min_micro_batches(pp, vp)
    if micro_batches < least:
        reason = (
            f"needs at least as many micro-batches as stages, {least}, but a step has"
            f" {micro_batches}"
        )
    else:
        rounds = info.divisor(pp, micro_batches)
        reason = (
            f"runs {micro_batches} micro-batches over {pp} pipeline ranks in {rounds} rounds, but"
            f" {micro_batches} is not divisible by {rounds}"
        )
    repairs = _micro_batch_repairs(layout, info, micro_batches, micro_batch)
    raise LayoutError(f"The schedule {info.name} {reason}. Use {repairs}.")


def _micro_batch_repairs(
    layout: Layout, info: ScheduleInfo, micro_batches: int, micro_batch: int | None
) -> str:
    pp, vp = layout.pp, layout.vp
    near = info.nearest_micro_batches(pp, vp, micro_batches)
    repairs = [f"{listed(near, last='or')} micro-batches"]
    if micro_batch is not None:
        unit = micro_batch * layout.dp
        repairs = [f"{GLOBAL_BATCH}={listed((count * unit for count in near), last='or')}"]
        rows = micro_batches * micro_batch
        sizes = [size for size in divisors(rows) if info.accepts(pp, vp, rows // size)]
        if sizes:
            repairs.append(f"{MICRO_BATCH}={min(sizes, key=lambda size: abs(size - micro_batch))}")
    others = [
        other
        for other in SCHEDULES.values()
        if other.allows_vp(vp) and other.accepts(pp, vp, micro_batches)
    ]
    if others:
        repairs.append(f"the schedule {listed((other.name for other in others), last='or')}")
    return listed(repairs, last="or")


def check_ramp(layout: Layout, ramp: BatchRamp, micro_batch: int, schedule: str) -> None:
    """Refuse a batch ramp of which one batch cannot be split as `check_batch` requires. The full
    batch must have been checked.

    Args:
        layout: resolved (`resolve_layout`).
        micro_batch: rows that pass through the model at once.
        schedule: name.

    Raises:
        LayoutError: with the nearest first batch and step that work.
    """
    info, unit = find_schedule(schedule), micro_batch * layout.dp
    wrong = next((size for size in ramp.sizes if not _suits(layout, info, unit, size)), None)
    if wrong is None:
        return
    if wrong % unit:
        reason = f"is not divisible by {MICRO_BATCH}={micro_batch} * dp {layout.dp} = {unit}"
    else:
        reason = (
            f"gives each rank {wrong // unit} micro-batch{'es' * (wrong != unit)}, which"
            f" {info.name} cannot run with pp {layout.pp}"
        )
    near = _nearest_ramp(layout, ramp, unit, info)
    works = (
        f"Use data.batch_ramp.from={near[0]} and data.batch_ramp.step={near[1]}"
        if near is not None
        else "Leave data.batch_ramp out"
    )
    smaller = f", or use a smaller {MICRO_BATCH}" if micro_batch > 1 and wrong % unit else ""
    raise LayoutError(
        f"The batch ramp {ramp} has a global batch of {wrong}, which {reason}. {works}{smaller}."
    )


def _suits(layout: Layout, info: ScheduleInfo, unit: int, size: int) -> bool:
    return size % unit == 0 and info.accepts(layout.pp, layout.vp, size // unit)


def _nearest_ramp(
    layout: Layout, ramp: BatchRamp, unit: int, info: ScheduleInfo
) -> tuple[int, int] | None:
    """Return the first batch and the step of a ramp to the full batch that works, near the given
    ones; None if none is found."""

    def working(first: int) -> Iterator[tuple[int, int]]:
        for step in sorted(
            (size * unit for size in divisors((ramp.full - first) // unit)),
            key=lambda step: abs(step - ramp.step),
        ):
            if all(_suits(layout, info, unit, size) for size in range(first, ramp.full, step)):
                yield first, step
                return

    firsts = sorted(range(unit, ramp.full, unit), key=lambda first: abs(first - ramp.first))
    found = [pair for first in islice(firsts, _FIRSTS_TRIED) for pair in working(first)]
    return min(
        found, key=lambda pair: abs(pair[0] - ramp.first) + abs(pair[1] - ramp.step), default=None
    )


_FIRSTS_TRIED = 64
"""First batches that are tried for the message about a ramp."""


def largest_micro_batch(
    layout: Layout, schedule: str, global_batch: int, others: Sequence[int] = ()
) -> int:
    """Return the largest micro-batch that the schedule accepts; 1 when none works, so that
    `check_batch` explains why.

    Args:
        others: smaller global batches that it must suit too.
    """
    check_sizes(**{GLOBAL_BATCH: global_batch})
    rows, info = global_batch // layout.dp, find_schedule(schedule)
    sizes = [
        size for size in divisors(max(rows, 1)) if info.accepts(layout.pp, layout.vp, rows // size)
    ]
    suiting = [
        size
        for size in sizes
        if all(_suits(layout, info, size * layout.dp, batch) for batch in others)
    ]
    return max(suiting, default=1)


def few_micro_batches(layout: Layout, schedule: str, micro_batches: int) -> str | None:
    """Return a warning with the predicted bubble when there are fewer micro-batches than stages,
    else None."""
    stages = layout.pp * layout.vp
    if layout.pp == 1 or micro_batches >= stages:
        return None
    info = find_schedule(schedule)
    idle = predicted_bubble(info, layout.pp, layout.vp, micro_batches)
    enough = 4 * stages
    better = predicted_bubble(info, layout.pp, layout.vp, enough)
    counted = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
    return (
        f"A step has {counted} for {stages} pipeline stages: with {info.name} each rank is"
        f" predicted to be idle for {idle:.0%} of the step. With {enough} micro-batches it would be"
        f" {better:.0%}."
    )
