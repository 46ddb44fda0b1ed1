"""Every technique on simulated GPUs, with streams as late as they may be, computes what one process
computes on the CPU."""

import dataclasses
import itertools
from typing import Any

import pytest
import simulated_fits
from parity import SCHEDULES, Cell
from simulated_parity import check, check_like_gloo
from zero_modes import MODES

AXES = ("tp", "pp", "dp", "cp", "ep")


def _with(axes: tuple[str, ...], **more: Any) -> Cell:
    """A cell in which these axes have degree 2; experts need other ranks, over which they are
    laid."""
    degrees = dict.fromkeys(axes, 2)
    model = "mixtral" if "ep" in axes else "llama"
    if "ep" in axes and not {"dp", "cp", "tp"} & set(axes):
        degrees["dp"] = 2
    return Cell(model, **degrees, **more)


LAYOUTS = [_with(axes) for size in (1, 2) for axes in itertools.combinations(AXES, size)]
LARGE = [
    Cell(tp=2, pp=2, dp=2),
    Cell(pp=4, dp=2),
    Cell(tp=4, dp=2),
    Cell("mixtral", tp=2, pp=2, dp=2, ep=2),
    Cell(tp=2, pp=2, cp=2),
]


@pytest.mark.parametrize(
    "cell", [Cell(), Cell("mixtral"), *dict.fromkeys(LAYOUTS + LARGE)], ids=lambda cell: cell.name
)
def test_axes(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str) -> None:
    check(Cell(pp=2, dp=2, schedule=schedule))
    if schedule in ("1F1B", "ZBVZeroBubble", "DualPipeV"):
        check(Cell(pp=4, schedule=schedule))


@pytest.mark.parametrize("mode", MODES)
def test_zero(mode: str) -> None:
    stage, options = MODES[mode]
    check(Cell("qwen2", dp=2, tp=2, zero=stage, options=tuple(sorted(options.items()))))
    if "by block" not in mode:
        check(
            Cell(
                "qwen2",
                dp=2,
                pp=2,
                zero=stage,
                schedule="ZBVZeroBubble",
                options=tuple(sorted(options.items())),
            )
        )


@pytest.mark.parametrize(
    ("stage", "kind"), [(1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "parameters")]
)
def test_offload(stage: int, kind: str) -> None:
    check(Cell("qwen2", dp=2, zero=stage, options=(("zero_offload", kind),)))
    check(Cell("qwen2", dp=2, pp=2, zero=stage, options=(("zero_offload", kind),)))


def test_compiled_experts() -> None:
    """The backward of an operator runs in a thread of the device, and in it that of the experts."""
    check(Cell("qwen2_moe", dp=2, ep=2), fit=simulated_fits.compiled, recompute="full")


BLOCKS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "full"},
    "recompute attention": {"recompute": "selective"},
    "offloaded activations": {"fit": simulated_fits.offloading, "recompute": "full"},
    "all activations offloaded": {"fit": simulated_fits.offloading},
    "without sequence parallelism": {"sequence_parallel": False},
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks(kind: str) -> None:
    check(Cell(tp=2, pp=2, zero=0), **BLOCKS[kind])
    check(Cell(dp=2, zero=3), **BLOCKS[kind])


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_context(kind: str) -> None:
    check(Cell(cp=2, dp=2, options=(("cp_kind", kind),)))
    check(Cell(cp=2, tp=2, zero=0, options=(("cp_kind", kind),)))


@pytest.mark.parametrize(
    "cell",
    [Cell(pp=2, dp=2), Cell(tp=2, dp=2, zero=2), Cell(dp=2, zero=3)],
    ids=lambda cell: cell.name,
)
def test_bf16(cell: Cell) -> None:
    check_like_gloo(dataclasses.replace(cell, dtype="bfloat16"))


def test_bf16_ring() -> None:
    """Flash attention rounds each tile's output to bf16; the tiles of a CPU are not rounded."""
    check_like_gloo(Cell(cp=2, dtype="bfloat16"), tolerance=2**-10)


FAMILIES = [
    Cell("qwen2", pp=2, dp=2, zero=2),
    Cell("gpt_oss", ep=2, dp=2),
    Cell("deepseek_v3", tp=2, ep=2),
]


@pytest.mark.parametrize("cell", FAMILIES, ids=lambda cell: cell.name)
def test_families(cell: Cell) -> None:
    """Tied weights over stages, experts with biases, latent attention."""
    check(cell)


def test_two_nodes() -> None:
    check(Cell(tp=2, pp=2, dp=2), nodes=2)
