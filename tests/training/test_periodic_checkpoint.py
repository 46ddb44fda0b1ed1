"""`PeriodicCheckpoint` in a Trainer on one process: when it saves, and what it keeps."""

import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
from alphabet_fits import MODEL, OPTIMIZER, alphabet, trainer
from lightning.pytorch.callbacks import EarlyStopping

from lightning_3d import PeriodicCheckpoint
from lightning_3d.app.config.save_interval import best_interval
from lightning_3d.app.training.callbacks.periodic_checkpoint import SaveTimes, interval
from lightning_3d.app.training.module import CausalLM


@pytest.mark.parametrize(
    ("steps", "every"), [(8, 50), (200, 50), (501, 51), (5000, 500), (10**6, 1000), (None, 1000)]
)
def test_the_interval_is_a_tenth_of_the_fit_within_bounds(steps: int | None, every: int) -> None:
    assert interval(steps) == every


def fit(
    folder: Path,
    saver: PeriodicCheckpoint,
    *callbacks: Any,
    resume: Path | None = None,
    **options: Any,
) -> list[str]:
    """The names of the checkpoints that are there afterwards."""
    pl.seed_everything(1, verbose=False)
    arguments = {"val_check_interval": None, "limit_val_batches": 0, **options}
    trainer(folder, saver, *callbacks, **arguments).fit(
        CausalLM(MODEL, OPTIMIZER), datamodule=alphabet(), ckpt_path=resume
    )
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_last_step_is_saved_and_the_newest_are_kept_over_a_resume(tmp_path: Path) -> None:
    def saver(every: int) -> PeriodicCheckpoint:
        return PeriodicCheckpoint(tmp_path / "checkpoints", every_n_train_steps=every, save_top_k=2)

    assert fit(tmp_path, saver(2), max_steps=7) == ["step_6.ckpt", "step_7.ckpt"]
    resume = tmp_path / "checkpoints" / "step_7.ckpt"
    assert fit(tmp_path, saver(3), max_steps=10, resume=resume) == ["step_10.ckpt", "step_9.ckpt"]


def test_each_nth_is_kept_over_a_resume(tmp_path: Path) -> None:
    """The first at or after each multiple of four steps, beside the newest."""

    def saver() -> PeriodicCheckpoint:
        return PeriodicCheckpoint(
            tmp_path / "checkpoints", every_n_train_steps=3, save_top_k=1, keep_every_n_steps=4
        )

    assert fit(tmp_path, saver(), max_steps=10) == ["step_10.ckpt", "step_6.ckpt", "step_9.ckpt"]
    resume = tmp_path / "checkpoints" / "step_10.ckpt"
    assert fit(tmp_path, saver(), max_steps=16, resume=resume) == [
        "step_12.ckpt",
        "step_16.ckpt",
        "step_6.ckpt",
        "step_9.ckpt",
    ]


def test_copied_checkpoints_count_and_so_do_those_of_an_attempt_that_kept_more(
    tmp_path: Path,
) -> None:
    def saver(name: str, keep: int) -> PeriodicCheckpoint:
        return PeriodicCheckpoint(
            tmp_path / name / "checkpoints",
            every_n_train_steps=2,
            save_top_k=keep,
            keep_every_n_steps=2,
        )

    fit(
        tmp_path / "a",
        PeriodicCheckpoint(tmp_path / "a" / "checkpoints", every_n_train_steps=2, save_top_k=3),
        max_steps=6,
    )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for name in ("a", "b"):
        again = PeriodicCheckpoint(
            tmp_path / name / "checkpoints", every_n_train_steps=2, save_top_k=2
        )
        resume = tmp_path / name / "checkpoints" / "step_6.ckpt"
        assert fit(tmp_path / name, again, max_steps=8, resume=resume) == [
            "step_6.ckpt",
            "step_8.ckpt",
        ]
    assert fit(tmp_path / "c", saver("c", 1), max_steps=2) == ["step_2.ckpt"]
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    resume = tmp_path / "d" / "checkpoints" / "step_2.ckpt"
    assert fit(tmp_path / "d", saver("d", 1), max_steps=6, resume=resume) == [
        "step_2.ckpt",
        "step_4.ckpt",
        "step_6.ckpt",
    ], "all are kept"


def test_the_interval_follows_from_measured_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves after step 2, then in the interval that is chosen then."""
    seen: list[tuple[int, int]] = []

    def choose(times: SaveTimes, trainer: pl.Trainer, present: int) -> int:
        seen.append((trainer.global_step, present))
        return 5

    monkeypatch.setattr("lightning_3d.app.training.callbacks.periodic_checkpoint.LEAST_STEPS", 2)
    monkeypatch.setattr(SaveTimes, "choose", choose)
    saver = PeriodicCheckpoint(tmp_path / "checkpoints", every_n_train_steps="auto", save_top_k=-1)
    assert fit(tmp_path, saver, max_steps=12) == [
        "step_10.ckpt",
        "step_12.ckpt",
        "step_2.ckpt",
        "step_5.ckpt",
    ]
    assert seen == [(2, 2), (5, 5), (10, 5), (12, 5)]


def test_times_of_steps_do_not_count_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    times = SaveTimes(hours_between_failures=1.0)
    fake = SimpleNamespace(
        global_step=3, world_size=2, strategy=SimpleNamespace(broadcast=lambda value: value)
    )
    times.begin(fake)  # type: ignore[arg-type]
    now, fake.global_step = 20.0, 13  # ten steps of two seconds
    with times.saving():
        now += 9.0
    assert times.choose(fake, 50) == 90  # type: ignore[arg-type]  # sqrt(2 * 9 s * 1800 s) = 180 s
    assert times.choose(fake, 80) == 80  # type: ignore[arg-type]  # near enough


@pytest.mark.parametrize(
    ("step", "save", "ranks", "steps"),
    [
        (5.0, 10.0, 16_384, 94),  # sqrt(2 * 10 s * 50,000 h / 16,384) = 469 s
        (5.0, 10.0, 8, 720),  # never more than an hour
        (1.0, 60.0, 10**6, 1200),  # never more than 5 % of the time
    ],
)
def test_young_and_daly(step: float, save: float, ranks: int, steps: int) -> None:
    found = best_interval(step, save, ranks)
    assert found.steps == steps
    by_hand = 3600 * 50_000 / ranks

    def lost(seconds: float) -> float:
        return save / seconds + seconds / 2 / by_hand

    if save / 0.05 < steps * step < 3600:  # where no bound holds it is the least
        assert lost(steps * step) <= min(lost(steps * step * 1.1), lost(steps * step / 1.1))
    assert f"every {steps} steps" in found.words


def test_a_short_fit_is_saved_once(tmp_path: Path) -> None:
    assert fit(tmp_path, PeriodicCheckpoint(tmp_path / "checkpoints"), max_steps=3) == [
        "step_3.ckpt"
    ]


def test_the_step_at_which_a_callback_stops_the_fit_is_saved(tmp_path: Path) -> None:
    stop = EarlyStopping("val_loss", stopping_threshold=100.0)
    saver = PeriodicCheckpoint(tmp_path / "checkpoints")
    assert fit(tmp_path, saver, stop, max_steps=8, val_check_interval=4, limit_val_batches=1) == [
        "step_4.ckpt"
    ]


class Fails(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise ArithmeticError


def test_nothing_is_saved_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError):
        fit(
            tmp_path,
            PeriodicCheckpoint(tmp_path / "checkpoints", every_n_train_steps=2),
            Fails(),
            max_steps=5,
        )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2.ckpt"]


def test_all_are_kept_or_the_best_of_a_metric(tmp_path: Path) -> None:
    everything = PeriodicCheckpoint(
        tmp_path / "all" / "checkpoints", every_n_train_steps=1, save_top_k=-1
    )
    assert len(fit(tmp_path / "all", everything, max_steps=5)) == 5
    best = PeriodicCheckpoint(
        tmp_path / "best" / "checkpoints", monitor="val_loss", every_n_train_steps=1, save_top_k=1
    )
    options = {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 1}
    assert len(fit(tmp_path / "best", best, **options)) == 1 and best.best_model_score is not None


def test_a_resume_in_another_folder_is_not_warned_of_scores_that_it_has_not(tmp_path: Path) -> None:
    def saver(name: str, **options: Any) -> PeriodicCheckpoint:
        return PeriodicCheckpoint(tmp_path / name / "checkpoints", every_n_train_steps=2, **options)

    assert fit(tmp_path / "a", saver("a"), saver("best", monitor="loss"), max_steps=2) == [
        "step_2.ckpt"
    ]
    resume = tmp_path / "a" / "checkpoints" / "step_2.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The dirpath has changed")
        fit(tmp_path / "b", saver("b"), resume=resume, max_steps=4)
        with pytest.raises(UserWarning, match="The dirpath has changed"):
            fit(tmp_path / "c", saver("c", monitor="loss"), resume=resume, max_steps=4)
