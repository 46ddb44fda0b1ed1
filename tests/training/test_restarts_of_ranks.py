"""A command that starts its ranks again after a failure: `trainer.restarts`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.runs.restarts import read_restarts
from lightning_3d.app.runs.status import RUNNING, RunStatus, read_status
from lightning_3d.app.training import job
from lightning_3d.errors import ConfigError

Attempts = Callable[..., tuple[tuple[int, str], list[str | None]]]


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempts:
    """Run attempts that end with given exit codes, with a checkpoint after each that is named.
    Returns the end, and what each resumed."""
    monkeypatch.setattr(
        "lightning_3d.app.runs.folder.newest_checkpoint", lambda path: next(newest, None)
    )
    monkeypatch.setattr(
        "lightning_3d.app.runs.folder.steps_of",
        lambda checkpoint: int(checkpoint.stem.removeprefix("step_")),
    )
    newest = iter([])

    def run(
        codes: list[int], checkpoints: list[str | None], **trainer: Any
    ) -> tuple[tuple[int, str], list[str | None]]:
        nonlocal newest
        newest = iter(checkpoints)
        resumed: list[str | None] = []

        def start(plan: Any, frozen: dict[str, Any], folder: RunFolder) -> tuple[int, str]:
            status = read_status(tmp_path)
            assert status is not None and status.status == RUNNING
            resumed.append(frozen["trainer"]["resume"])
            return codes[len(resumed) - 1], "rank 1 failed"

        monkeypatch.setattr(job, "_start_ranks", start)
        status = RunStatus.begun()
        status.write(tmp_path)
        frozen = {"trainer": {"resume": None, **trainer}}
        end = job._start_until_done(None, frozen, RunFolder(tmp_path, (), frozenset()), status)  # type: ignore[arg-type]
        assert frozen["trainer"]["resume"] is None, "the configuration of the run stays as it is"
        return end, resumed

    return run


def test_ranks_resume_the_newest_checkpoint_of_each_failed_attempt(
    attempts: Attempts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code, _), resumed = attempts(
        [1, 1, 1, 0], [None, "c/step_20.ckpt", "c/step_40.ckpt"], restarts=9
    )
    assert (code, resumed) == (0, [None, None, "c/step_20.ckpt", "c/step_40.ckpt"])
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "lightning_3d: starting the ranks again from the beginning (restart 1 of 9)"
    assert said[2] == "lightning_3d: starting the ranks again from c/step_40.ckpt (restart 3 of 9)"
    assert [(one.step, one.reason) for one in read_restarts(tmp_path)] == [
        (step, "rank 1 failed.") for step in (0, 20, 40)
    ]


@pytest.mark.parametrize(
    ("codes", "restarts", "ended"), [([1], 0, 1), ([1, 1], 1, 1), ([2], 3, 2), ([1, 143], 3, 143)]
)
def test_number_of_restarts_and_ends_that_are_no_failures(
    attempts: Attempts, codes: list[int], restarts: int, ended: int
) -> None:
    (code, _), resumed = attempts(codes, [None] * 3, restarts=restarts)
    assert code == ended and len(resumed) == len(codes)


def test_ranks_that_make_no_progress_are_not_started_for_ever(
    attempts: Attempts, capsys: pytest.CaptureFixture[str]
) -> None:
    _, resumed = attempts([1] * 9, ["c/step_20.ckpt"] * 9, restarts=9, restarts_without_progress=3)
    assert len(resumed) == 3
    assert (
        "is not started again, because it has failed 3 times in a row after step 20"
        in capsys.readouterr().err
    )


def test_a_negative_number_is_refused() -> None:
    from lightning_3d.app.config.plan_run import _check_trainer
    from lightning_3d.app.config.run_config import TrainerConfig

    trainer = TrainerConfig(max_steps=4, val_check_interval=4, restarts=-1)
    with pytest.raises(
        ConfigError, match=r"trainer.restarts must be a finite number of at least 0; got -1"
    ):
        _check_trainer(trainer)
