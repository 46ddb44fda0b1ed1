"""``lightning_3d.Engine`` trains what a plain loop on one process trains, without a Trainer."""

from typing import Any

import models
import parity
import pytest
from engine_fits import train_with_engine
from parity import Cell, strategy_arguments
from ranks import run_ranks
from reference import reference

QUICK = [
    Cell("llama", tp=2, pp=2, schedule="ZBVZeroBubble"),
    Cell("qwen3", pp=2, dp=2, schedule="1F1B", zero=2),
    Cell("gemma3", tp=2, dp=2, zero=3),
]
SLOW = [
    Cell("llama", pp=2, dp=2, schedule="GPipe", zero=1),
    Cell("qwen2", tp=2, pp=2, schedule="Interleaved1F1B"),
    Cell("mistral", pp=2, dp=2, schedule="LoopedBFS", zero=1),
    Cell("phi3", pp=2, schedule="InterleavedZeroBubble"),
    Cell("gpt_neox", pp=2, dp=2, schedule="DualPipeV"),
    Cell(models.PLAIN, tp=2, pp=2, dtype="float64"),
    Cell("llama", cp=2, tp=2),
    Cell("llama", cp=2, dp=2, zero=3),
    Cell("mixtral", dp=4, ep=2, zero=1),
    Cell("qwen3_moe", tp=2, dp=2, ep=4),
    Cell("llama"),
]


@pytest.mark.parametrize(
    "cell",
    [*QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in SLOW)],
    ids=lambda cell: cell.name,
)
def test_a_loop_without_a_trainer(cell: Cell) -> None:
    check(cell)


@pytest.mark.parametrize(
    ("zero", "accumulate", "announced"),
    [
        (1, 2, None),
        pytest.param(0, 2, None, marks=pytest.mark.slow),
        pytest.param(2, 2, None, marks=pytest.mark.slow),
        pytest.param(3, 1, None, marks=pytest.mark.slow),
        pytest.param(1, 2, True, marks=pytest.mark.slow),
        pytest.param(1, 2, False, marks=pytest.mark.slow),
    ],
)
def test_several_batches_are_one_step(zero: int, accumulate: int, announced: bool | None) -> None:
    cell = Cell("llama", pp=2, dp=2, zero=zero)
    check(cell, accumulate=accumulate, announced=announced, micro_batch_size=1)


def check(cell: Cell, **options: Any) -> None:
    expected, noise = reference(cell.recipe)
    parts = run_ranks(
        train_with_engine,
        cell.world_size,
        cell.recipe,
        **strategy_arguments(cell) | options,
        timeout=180,
    )
    parity.assert_same_run(parts, expected, cell.dtype, noise)
