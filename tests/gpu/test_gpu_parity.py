"""Every technique on real GPUs, with real NCCL, computes what a plain loop in one process does: to
1e-10 in float64, 1e-5 with ZeRO."""

import itertools
from typing import Any

import pytest
from gpu_ranks import check
from parity import SCHEDULES, Cell
from zero_modes import MODES

AXES = ("tp", "pp", "dp", "cp", "ep")


def _with(axes: tuple[str, ...], dtype: str = "float64") -> Cell:
    """A cell in which these axes have degree 2; experts need other ranks, over which they are
    laid."""
    degrees = dict.fromkeys(axes, 2)
    if "ep" in axes and not {"dp", "cp", "tp"} & set(axes):
        degrees["dp"] = 2
    return Cell("mixtral" if "ep" in axes else "llama", dtype=dtype, **degrees)


LAYOUTS = list(
    dict.fromkeys(_with(axes) for size in (1, 2) for axes in itertools.combinations(AXES, size))
)
TWO, FOUR = ([cell for cell in LAYOUTS if cell.world_size == ranks] for ranks in (2, 4))


@pytest.mark.parametrize(
    "cell", [*TWO, *(_with((axis,), "float32") for axis in AXES)], ids=lambda cell: cell.name
)
def test_two_ranks(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("mode", MODES)
def test_zero(mode: str) -> None:
    stage, options = MODES[mode]
    check(Cell("qwen2", dp=2, zero=stage, options=tuple(sorted(options.items()))))


@pytest.mark.parametrize(
    ("stage", "kind"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]
)
def test_offload(stage: int, kind: str) -> None:
    check(Cell("qwen2", dp=2, zero=stage, options=(("zero_offload", kind),)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str) -> None:
    check(Cell(pp=2, schedule=schedule, dtype="float64"))


BLOCKS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "recompute attention": {"recompute": "selective"},
    "offloaded activations": {"offload_activations": True},
    "without sequence parallelism": {"sequence_parallel": False},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks(kind: str) -> None:
    check(Cell(tp=2, dtype="float64"), **BLOCKS[kind])
    check(Cell(pp=2, dtype="float64"), **BLOCKS[kind])


FAMILIES = [
    Cell("qwen2", pp=2, dtype="float64"),
    Cell("gpt_oss", ep=2, dp=2, dtype="float64"),
    Cell("deepseek_v3", tp=2, ep=2, dtype="float64"),
    Cell("gemma3", tp=2, dtype="float64"),
    Cell("gpt_neox", tp=2, dtype="float64"),
]


@pytest.mark.parametrize("cell", FAMILIES, ids=lambda cell: cell.name)
def test_families(cell: Cell) -> None:
    """Tied weights over stages, experts with biases, latent attention, windows, fused
    projections."""
    check(cell)


@pytest.mark.parametrize("cell", FOUR, ids=lambda cell: cell.name)
def test_four_ranks(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages(schedule: str) -> None:
    check(Cell(pp=4, schedule=schedule, dtype="float64"))


def test_eight_ranks() -> None:
    check(Cell(tp=2, pp=2, dp=2, zero=1))
