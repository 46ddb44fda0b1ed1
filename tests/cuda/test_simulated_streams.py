"""What a GPU may do and a CPU never does: few kernels at a time, kernels that are loaded late,
streams that are prompt."""

from __future__ import annotations

import parity
import pytest
import simulated_ranks
from parity import SCHEDULES, Cell
from simulated_parity import check

FLAT = [
    Cell(tp=2, dp=2),
    Cell(
        "qwen2",
        dp=2,
        zero=3,
        options=(("zero_gather", "micro_batch"), ("zero_reduce", "micro_batch")),
    ),
    Cell("qwen2", tp=2, dp=2, zero=2),
    Cell("qwen2", dp=4, zero=2, options=(("zero_shard_size", 2),)),
    Cell("qwen2", dp=4, zero=3, options=(("zero_shard_size", 2),)),
    Cell(cp=2, dp=2),
    Cell(cp=2, options=(("cp_kind", "ulysses"),)),
    Cell("mixtral", ep=2, dp=2),
]


@pytest.mark.parametrize("cell", FLAT, ids=lambda cell: cell.name)
def test_one_nccl_kernel_at_a_time(cell: Cell) -> None:
    """Without a pipeline all ranks launch their collectives in one order, over all groups."""
    check(cell, {"CUDASIM_NCCL_MOST": 1, "CUDASIM_HANG": 30})


@pytest.mark.parametrize(
    "cell",
    [Cell(dp=2), Cell(tp=2, pp=2), Cell("qwen2", dp=2, zero=3), Cell(pp=4)],
    ids=lambda cell: cell.name,
)
def test_prompt_streams(cell: Cell) -> None:
    check(cell, {"CUDASIM_DELAY": 0.0005})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lazily_loaded_kernels(schedule: str) -> None:
    """The first launch of a kernel may wait for the whole device, also for a receive whose sender
    has not come yet."""
    check(Cell(pp=2, schedule=schedule), {"CUDASIM_LAZY": 1, "CUDASIM_HANG": 30})


RESIDENT = {
    ("GPipe", 2): 1,
    ("1F1B", 2): 2,
    ("ZBVZeroBubble", 2): 2,
    ("GPipe", 4): 1,
    ("1F1B", 4): 3,
    ("InterleavedZeroBubble", 4): 4,
}
"""NCCL kernels that must fit on a GPU together, by schedule and pipeline ranks: messages of both
directions and of both neighbours."""


@pytest.mark.parametrize(("schedule", "pp"), RESIDENT, ids=str)
def test_few_nccl_kernels_are_resident_together(schedule: str, pp: int) -> None:
    check(
        Cell(pp=pp, schedule=schedule),
        {"CUDASIM_NCCL_MOST": RESIDENT[schedule, pp], "CUDASIM_HANG": 30},
    )


def test_a_pipeline_needs_two_of_them() -> None:
    cell = Cell(pp=2)
    arguments = parity.strategy_arguments(cell)
    one = {"CUDASIM_NCCL_MOST": 1, "CUDASIM_HANG": 3}
    ranks = simulated_ranks.attempt(
        parity.train_on_rank, 2, cell.recipe, environment=one, **arguments
    )
    assert any("HANG" in rank.output for rank in ranks)
