"""Checkpoints of an ``Engine`` and of ``Lightning3DStrategy`` are the same: each reads those of the
other, in another layout."""

from pathlib import Path

import parity
import pytest
from engine_fits import make_engine, train_with_engine
from parity import Part, train_on_rank
from ranks import run_ranks
from reference import Recipe, Run, reference

RECIPE = Recipe(steps=3)


def after_the_first(run: Run) -> Run:
    return Run(run.losses[1:], run.grad_norms[1:], run.weights)


def test_each_resumes_what_the_other_saved(tmp_path: Path) -> None:
    expected, noise = reference(RECIPE)
    by_engine, by_trainer = str(tmp_path / "engine"), str(tmp_path / "trainer.ckpt")
    whole = run_ranks(
        train_with_engine,
        4,
        RECIPE,
        layout="tp2_pp2",
        micro_batch_size=4,
        zero_stage=0,
        save=by_engine,
    )
    parity.assert_same_run(whole, expected, noise=noise)
    run_ranks(
        train_on_rank, 2, RECIPE, layout="pp2", micro_batch_size=4, zero_stage=1, save=by_trainer
    )
    parts = run_ranks(
        train_with_engine,
        2,
        RECIPE,
        layout="dp2",
        micro_batch_size=4,
        zero_stage=3,
        resume=by_trainer,
    )
    parity.assert_same_run(parts, after_the_first(expected), noise=noise)
    parts = run_ranks(continue_with_a_trainer, 2, RECIPE, by_engine)
    parity.assert_same_run(parts, after_the_first(expected), noise=noise)


def continue_with_a_trainer(recipe: Recipe, path: str) -> Part:
    """An engine does not know the place in the data, so the rows of the first step are left out."""
    from parity import Module, Rows, fit_on_rank
    from reference import data

    rows = {key: value[recipe.global_batch :] for key, value in data(recipe).items()}
    return fit_on_rank(
        recipe,
        Rows(rows),
        Module(recipe),
        resume=path,
        layout="tp2",
        micro_batch_size=4,
        zero_stage=1,
    )


@pytest.mark.slow
def test_a_state_of_the_users_comes_back(tmp_path: Path) -> None:
    found = run_ranks(save_and_load, 2, RECIPE, str(tmp_path / "checkpoint"))
    assert found == [({"epoch": 3, "seen": [1, 2]}, 0)] * 2


def save_and_load(recipe: Recipe, path: str) -> tuple[dict[str, object], int]:
    with make_engine(recipe, layout="pp2", micro_batch_size=4) as engine:
        engine.save(path, {"epoch": 3, "seen": [1, 2]})
        return engine.load(path), engine.steps
