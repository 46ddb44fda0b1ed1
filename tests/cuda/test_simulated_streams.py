"""What a GPU may do and a CPU never does: few kernels at a time, kernels that are loaded late, streams that are prompt."""

from __future__ import annotations

import pytest
from parity import SCHEDULES, Cell
from simulated_parity import check

FLAT = [
    Cell(tp=2, dp=2),
    Cell("qwen2", dp=2, zero=3, options=(("zero_gather", "micro_batch"), ("zero_reduce", "micro_batch"))),
    Cell("qwen2", tp=2, dp=2, zero=2),
    Cell(cp=2, dp=2),
    Cell(cp=2, options=(("cp_kind", "ulysses"),)),
    Cell("mixtral", ep=2, dp=2),
]


@pytest.mark.parametrize("cell", FLAT, ids=lambda cell: cell.name)
def test_one_nccl_kernel_at_a_time(cell: Cell) -> None:
    """Without a pipeline all ranks launch their collectives in one order, over all groups."""
    check(cell, {"CUDASIM_NCCL_MOST": 1, "CUDASIM_HANG": 10})


@pytest.mark.parametrize("cell", [Cell(dp=2), Cell(tp=2, pp=2), Cell("qwen2", dp=2, zero=3), Cell(pp=4)], ids=lambda cell: cell.name)
def test_prompt_streams(cell: Cell) -> None:
    check(cell, {"CUDASIM_DELAY": 0.0005})


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lazily_loaded_kernels(schedule: str) -> None:
    """The first launch of a kernel may wait for the whole device, also for a receive whose sender has not come yet."""
    check(Cell(pp=2, schedule=schedule), {"CUDASIM_LAZY": 1, "CUDASIM_HANG": 10})
