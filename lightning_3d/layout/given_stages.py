"""Pipeline stages whose numbers of blocks the user gives (`parallelism.stages`). Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lightning_3d.errors import LayoutError, plural
from lightning_3d.layout.layout import Layout

AUTO = "auto"
"""Value of `parallelism.stages` with which the planner splits the blocks."""


def listed_stages(stages: Any) -> Any:
    """Return `parallelism.stages` as far as it is known before the planner is asked: None for
    auto."""
    return None if stages == AUTO else stages


def given_stages(blocks: Sequence[int], layout: Layout, layers: int | None = None) -> list[range]:
    """Return the blocks of each stage, as ranges of indices.

    Args:
        blocks: number of blocks of each stage, in the order of the stages.
        layers: number of blocks of the model; None if it is unknown.

    Raises:
        LayoutError: there are more or fewer numbers than stages (pp * vp), a stage is empty, or the
            sum is not the number of blocks.
    """
    stages = layout.pp * layout.vp
    if blocks == AUTO:
        raise LayoutError(
            "stages='auto' asks the planner, which knows the GPUs on the command line and in"
            " lightning_3d.planned(...). Use one of these, or pass the number of blocks of each"
            " stage."
        )
    if not isinstance(blocks, (list, tuple)):
        parts = f"the number of blocks of each of the {plural(stages, 'stage')} of {layout}"
        raise LayoutError(f"stages={blocks!r} must be auto or a list: {parts}.")
    if len(blocks) != stages or not all(map(_is_count, blocks)):
        found = (
            f"stages={list(blocks)} must have {plural(stages, 'whole number')}, each at least 1:"
            " the blocks of each stage"
        )
        raise LayoutError(
            f"{found} of {layout} (pp {layout.pp} * vp {layout.vp})."
            f" {_repair(blocks, stages, layers)}"
        )
    if layers is not None and sum(blocks) != layers:
        raise LayoutError(
            f"stages={list(blocks)} has {plural(sum(blocks), 'block')}, but the model has {layers}."
            f" {_repair(blocks, stages, layers)}"
        )
    ends = list(accumulate(blocks))
    return [range(end - count, end) for count, end in zip(blocks, ends, strict=True)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _repair(blocks: Sequence[int], stages: int, layers: int | None) -> str:
    if layers is None or layers < stages:
        return "Leave it out to let the stages be balanced."
    even = [layers // stages + (stage >= stages - layers % stages) for stage in range(stages)]
    rest = (
        layers - sum(blocks[:-1])
        if len(blocks) == stages and all(map(_is_count, blocks[:-1]))
        else 0
    )
    works = [*blocks[:-1], rest] if rest >= 1 else even
    return f"Use for example stages={works}, or leave it out to let the stages be balanced."
