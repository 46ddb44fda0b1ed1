"""Options of the layout, and of what a model computes in it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from lightning_3d.errors import LayoutError
from lightning_3d.layout.layout import Layout
from lightning_3d.options.schema import OptionGroup, option


def _check_micro_batch(name: str, value: Any) -> None:
    if value is not None and value < 1:
        raise LayoutError(f"{name} must be at least 1; got {value}.")


@dataclass(frozen=True)
class LayoutOptions(OptionGroup):
    """Options of the layout, its schedule and the size of a micro-batch."""

    layout: str | Layout | None = option(
        None,
        "name such as tp2_pp2_dp2: the axes (tp, pp, dp, cp, ep, vp) and their sizes. An axis that"
        " you leave out has size 1. In a script it may also be a Layout, or null for data"
        " parallelism over all ranks; lightning_3d.planned can choose it",
    )
    _: KW_ONLY
    micro_batch_size: int | None = option(
        None,
        "sequences (rows) of a micro-batch. null means as many as the schedule allows",
        _check_micro_batch,
    )
    order: Sequence[str] | None = option(
        None,
        "order in which ranks fill the axes, innermost axis first. null means [tp, cp, pp, dp],"
        " where neighboring ranks form a tensor-parallel group",
    )
    schedule: str | None = option(
        None,
        "pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble,"
        " ZBVZeroBubble or DualPipeV. null means 1F1B, or Interleaved1F1B if vp is above 1",
    )
    vp: int | None = option(
        None,
        "stages per pipeline rank. null uses the number that the layout gives or the schedule"
        " needs",
    )
    elastic: str | bool = option(
        False,
        "true continues a run with fewer data-parallel ranks where nodes are missing, with the same"
        " global batch and the same order of data. For ranks that torchrun or SLURM starts, such as"
        " torchrun --nnodes 2:4. In a script it is the name of the layout with all ranks, layout is"
        " the smaller one (lightning_3d.fitting_layout), and micro_batch_size must be given",
    )
