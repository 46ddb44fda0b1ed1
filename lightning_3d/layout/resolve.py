"""The layout and schedule of a run, from a layout's name and options. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_3d.errors import LayoutError, listed
from lightning_3d.layout.layout import Layout, divisors
from lightning_3d.layout.schedules import (
    ScheduleInfo,
    default_schedule,
    find_schedule,
    schedules_for,
)


def resolve_layout(
    layout: str | Layout,
    schedule: str | None = None,
    vp: int | None = None,
    order: Sequence[str] | None = None,
) -> tuple[Layout, str]:
    """Combine what a layout's name, the schedule and the option `vp=` say about stages per rank.

    Args:
        layout: name or layout; vp 1 in it means that none is given.
        schedule: name, in any case; None for `default_schedule`.
        vp: the option, None when not given. It may repeat the layout's vp but not contradict it.
        order: rank order; None for the layout's own.

    Returns:
        The layout and the name of the schedule. Where no vp is given, a V or looped schedule with a
        pipeline gets vp 2.

    Raises:
        LayoutError: vp contradicts the layout or the schedule, or is above 1 without a pipeline.
    """
    if isinstance(layout, str):
        layout = Layout.parse(layout, order=order)
    elif order is not None:
        layout = replace(layout, order=tuple(order))
    if vp is not None and layout.vp not in (1, vp):
        raise LayoutError(
            f"The layout {layout} has vp {layout.vp}, but the option vp is {vp}. Set only one of"
            " them."
        )
    if vp is not None:
        layout = replace(layout, vp=vp)
    info = find_schedule(schedule) if schedule is not None else default_schedule(layout.vp)
    if layout.pp > 1 and layout.vp == 1 and vp is None:
        layout = replace(layout, vp=info.default_vp)
    check_schedule(layout, info.name)
    return layout, info.name


def resolve_available(
    layout: str | Layout | None, schedule: str | None, vp: int | None, order: Sequence[str] | None
) -> tuple[Layout | None, str]:
    """Resolve a layout as `resolve_layout` does and check its expert groups. None means data
    parallelism over all ranks.

    Raises:
        LayoutError: as `resolve_layout` and `check_expert_groups`; vp or order without a layout.
    """
    if layout is None:
        if vp is not None or order is not None:
            raise LayoutError(
                "vp= and order= need a layout, for example Lightning3DStrategy('pp2_dp2', vp=2)."
            )
        return None, find_schedule(schedule or "1F1B").name
    if layout == "auto":
        raise LayoutError(
            'layout="auto" needs the planner, which must know the model, the cluster and the batch:'
            ' Lightning3DStrategy(**lightning_3d.planned(module, cluster="h100_4x8",'
            " sequence_length=4096, global_batch_size=256)). Or name a layout."
        )
    resolved, name = resolve_layout(layout, schedule, vp, order)
    check_expert_groups(resolved)
    return resolved, name


def check_schedule(layout: Layout, schedule: str) -> ScheduleInfo:
    """Refuse a number of stages per rank that the schedule, or a single pipeline rank, cannot run.

    Args:
        layout: resolved (`resolve_layout`).

    Raises:
        LayoutError: with the vp, or the schedules, that would work.
    """
    info = find_schedule(schedule)
    if layout.pp == 1:
        if layout.vp > 1:
            without = replace(layout, vp=1)
            raise LayoutError(
                f"Layout {layout} has {layout.vp} stages on each pipeline rank (vp) but only one"
                f" pipeline rank (pp 1). Use {without}, or a pp of at least 2."
            )
        return info
    if not info.allows_vp(layout.vp):
        need = "exactly 2 stages" if info.v_shaped else "one stage"
        right = replace(layout, vp=info.default_vp)
        raise LayoutError(
            f"The schedule {info.name} runs {need} on each pipeline rank, but the layout {layout}"
            f" has vp {layout.vp}. Use {right} (vp {right.vp}), or keep vp {layout.vp} and use the"
            f" schedule {schedules_for(layout.vp)}."
        )
    return info


def check_expert_groups(layout: Layout) -> None:
    """Refuse expert groups that do not fill the ranks of a stage.

    Raises:
        LayoutError: ep does not divide tp * cp * dp.
    """
    ranks = layout.tp * layout.cp * layout.dp
    if ranks % layout.ep == 0:
        return
    relation = "is more than" if layout.ep > ranks else "does not divide"
    factors = (
        " * ".join(
            f"{axis} {getattr(layout, axis)}"
            for axis in ("tp", "cp", "dp")
            if getattr(layout, axis) > 1
        )
        or "no axis above 1"
    )
    raise LayoutError(
        f"Expert parallelism uses the ranks of one pipeline stage, but ep {layout.ep} {relation}"
        f" the {ranks} ranks of a stage of"
        f" {layout} ({factors}). Use"
        f" {listed((replace(layout, ep=ep).name for ep in nearest(divisors(ranks), layout.ep)), last='or')}."  # noqa: E501
    )


def nearest(choices: Sequence[int], wanted: int) -> list[int]:
    """Return the largest choice up to `wanted` and the smallest above it."""
    return [
        *[max(choice for choice in choices if choice <= wanted)],
        *[choice for choice in choices if choice > wanted][:1],
    ]
