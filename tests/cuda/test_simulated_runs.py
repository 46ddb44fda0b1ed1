"""Whole runs on simulated GPUs: what they log and save is what the same runs on CPU ranks log and
save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora_fits
import parity
import pytest
import reference
import simulated_fits
import simulated_ranks
from finetuned import MODES
from parity import Cell
from simulated_parity import LATE, assert_close

from lightning_3d.layout import Layout


def both(fn: Any, layout: str, *args: Any, **more: Any) -> tuple[Any, Any]:
    """Results of rank 0 on simulated GPUs and on CPU ranks."""
    size = Layout.parse(layout).world_size
    gpu = simulated_ranks.run(fn, size, layout, *args, environment=LATE, **more)
    cpu = simulated_ranks.run(fn, size, layout, *args, accelerator="cpu", **more)
    return gpu[0], cpu[0]


@pytest.mark.parametrize("layout", ["pp2_dp2", "tp2_dp2"])
@pytest.mark.parametrize("zero", [0, 2])
def test_validation_after_training(layout: str, zero: int) -> None:
    assert_close(*both(simulated_fits.straight, layout, zero_stage=zero))


@pytest.mark.parametrize("layout", ["pp2", "tp2"])
def test_mixed_precision(layout: str) -> None:
    assert_close(
        *both(simulated_fits.straight, layout, epochs=1, precision="bf16-mixed"), tolerance=1e-5
    )


@pytest.mark.parametrize(
    ("first", "second", "strategy"),
    [
        ("pp2", "pp2", {}),
        ("dp2", "dp2", {"zero_stage": 1, "zero_offload": "optimizer"}),
        ("tp2", "pp2", {}),
        ("dp2", "tp2", {"zero_stage": 3}),
        ("pp2", "dp2", {"zero_stage": 2}),
    ],
    ids=str,
)
def test_goes_on_from_a_checkpoint_saved_in_the_background(
    tmp_path: Path, first: str, second: str, strategy: dict[str, Any]
) -> None:
    """The copies to the host that a save reads come as late as they may."""
    [whole, *_] = simulated_ranks.run(
        simulated_fits.straight, 2, second, accelerator="cpu", **strategy
    )
    [found, *_] = simulated_ranks.run(
        simulated_fits.resumed, 2, first, second, str(tmp_path), environment=LATE, **strategy
    )
    assert_close(found, whole)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_averages_of_weights(layout: str) -> None:
    assert_close(*both(simulated_fits.averaged, layout))


@pytest.mark.parametrize("layout", ["pp2", "tp2", "pp2_dp2"])
def test_predictions(layout: str) -> None:
    assert_close(*both(simulated_fits.predicted, layout))


def test_accumulated_batches() -> None:
    cell = Cell(dp=2, pp=2)
    found, expected = (
        simulated_ranks.run(
            parity.train_on_rank,
            4,
            cell.recipe,
            accumulate=2,
            accelerator=kind,
            **parity.strategy_arguments(cell),
        )[0]
        for kind in ("gpu", "cpu")
    )
    assert_close(found.losses + found.grad_norms, expected.losses + expected.grad_norms)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_what_callbacks_read_of_accumulated_batches(layout: str) -> None:
    assert_close(*both(simulated_fits.accumulated, layout))


@pytest.mark.parametrize("mode", ["zero0", "zero2", "zero3 by block"])
def test_lora(mode: str) -> None:
    stage, options = MODES[mode]
    cell = Cell(tp=2, dp=2, zero=stage, options=tuple(sorted(options.items())))
    recipe = lora_fits.recipe_of(cell, lora_fits.QUERIES)
    parts = simulated_ranks.run(
        lora_fits.train_on_rank, 4, recipe, environment=LATE, **parity.strategy_arguments(cell)
    )
    [expected] = simulated_ranks.run(reference.train, 1, recipe, accelerator="cpu")
    parity.assert_same_run(parts, expected)


@pytest.mark.parametrize("layout", ["pp2_dp2", "tp2"])
def test_traces(layout: str) -> None:
    size = Layout.parse(layout).world_size
    assert both(simulated_fits.traces, layout) == (("cuda", size, True), ("cpu", size, True))


def test_a_rank_that_raises_ends_the_others(tmp_path: Path) -> None:
    ranks = simulated_ranks.attempt(
        simulated_fits.interrupted, 2, "pp2", str(tmp_path), "raises", timeout=60
    )
    assert [rank.code for rank in ranks] == [1, 1]
    assert "rank 1 fails on purpose" in ranks[1].output
    assert not any(rank.complaints for rank in ranks)


def test_sigterm_saves_and_ends(tmp_path: Path) -> None:
    ranks = simulated_ranks.attempt(
        simulated_fits.interrupted, 2, "pp2", str(tmp_path), "SIGTERM", timeout=60
    )
    assert all(rank.code is not None for rank in ranks), ranks[0].output[-3000:]
    assert list(tmp_path.iterdir()), "a checkpoint"
    assert not any(rank.complaints for rank in ranks)
