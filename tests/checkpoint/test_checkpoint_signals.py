"""Checkpoints of Lightning's callbacks with saving in the background, when a run ends or is ended:
each is whole before the process ends, and what is resumed from it is what nobody had disturbed.
"""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from parity import Cell
from ranks import run_ranks
from saving import Values, check_checkpoints, check_values, fit, read_values, undisturbed
from starts import in_fresh_process, start

from lightning_3d import PeriodicCheckpoint
from lightning_3d.app.runs.folder import newest_checkpoint
from lightning_3d.checkpoint.writing import TensorSave
from lightning_3d.ranks.supervisor import launch

STEPS, TOLD_AT = 9, 4
CELLS = [
    Cell(pp=2, zero=1),
    *(
        pytest.param(cell, marks=pytest.mark.full)
        for cell in (Cell(tp=2, dp=2, zero=3), Cell(pp=2, dp=2, zero=2))
    ),
]


class SendSignal(pl.Callback):
    """In the middle of a step: one rank, or each (None), sends a signal to itself, or to the
    process that started it."""

    def __init__(self, number: int, rank: int | None = 1, to_parent: bool = False) -> None:
        self.number, self.rank, self.to_parent = number, rank, to_parent

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == TOLD_AT and self.rank in (None, trainer.global_rank):
            os.kill(os.getppid() if self.to_parent else os.getpid(), self.number)
            time.sleep(0.5 if self.to_parent else 0)  # until all have it


class InterruptAgain(SendSignal):
    """A second Ctrl-C, when the first one has ended the fit and nothing is saved yet."""

    def on_exception(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)


class SlowSaves(pl.Callback):
    """A save is under way for so long that the end of the run comes before its own."""

    def on_fit_start(self, *args: Any) -> None:
        write = TensorSave.write
        TensorSave.write = lambda save, folder: time.sleep(1.0) or write(save, folder)  # type: ignore[method-assign, func-returns-value]


def saver(run: Path, **options: Any) -> ModelCheckpoint:
    defaults = {
        "filename": "step_{step}",
        "auto_insert_metric_name": False,
        "every_n_train_steps": 2,
    }
    return ModelCheckpoint(run / "checkpoints", **{**defaults, **options})


def fit_until_told(cell: Cell, run: Path, values: Path, how: str, resume: str | None) -> None:
    callbacks: dict[str, list[pl.Callback]] = {
        "to one rank": [
            SendSignal(signal.SIGTERM),
            SlowSaves(),
            OnExceptionCheckpoint(run / "checkpoints", "ended"),
            saver(run),
        ],
        "to the supervisor": [
            SendSignal(signal.SIGTERM, to_parent=True),
            SlowSaves(),
            saver(run, save_on_exception=True, save_top_k=-1),
        ],
        "while it saves": [SendSignal(signal.SIGTERM), SlowSaves(), saver(run)],
        "Ctrl-C to one rank": [
            SendSignal(signal.SIGINT),
            SlowSaves(),
            PeriodicCheckpoint(run / "checkpoints", every_n_train_steps=2),
        ],
        "Ctrl-C to the supervisor": [
            SendSignal(signal.SIGINT, to_parent=True),
            PeriodicCheckpoint(run / "checkpoints"),
        ],
        "Ctrl-C twice": [
            InterruptAgain(signal.SIGINT, rank=None),
            PeriodicCheckpoint(run / "checkpoints"),
        ],
        "": [saver(run)],
    }
    fit(cell, STEPS, values, callbacks[how], resume)


SIGTERM = ("to one rank", "to the supervisor", "while it saves")
CTRL_C = ("Ctrl-C to one rank", "Ctrl-C to the supervisor")


def told_to_end(tmp_path: Path, cell: Cell, hows: tuple[str, ...]) -> None:
    expected = undisturbed(cell, STEPS, tmp_path / "undisturbed")
    number = signal.SIGINT if hows[0].startswith("Ctrl-C") else signal.SIGTERM
    for how in hows:
        run = tmp_path / how
        run.mkdir()
        arguments = (cell, run, run / "before.csv", how, None)
        if how == "to the supervisor" or how in CTRL_C:
            outcome = launch(
                fit_until_told, arguments, cell.world_size, logs=run / "logs", fork=True, threads=1
            )
            assert (outcome.exit_code, outcome.message) == (128 + number, None)
        else:
            ended = start(fit_until_told, arguments, cell.world_size, run / "logs")
            assert set(ended.codes) == {128 + number}, str(ended)
        saved = check_checkpoints(run)
        reached = max(read_values(run / "before.csv"))
        # The step in which the signal came is finished. Without a callback that saves then, the
        # save under way is.
        assert (saved, reached) == (4 if how == "while it saves" else TOLD_AT + 1, TOLD_AT + 1), how
        goes_on(cell, run, saved, expected)


def goes_on(cell: Cell, run: Path, saved: int, expected: Values) -> None:
    resume = newest_checkpoint(run)
    ended = start(
        fit_until_told, (cell, run, run / "after.csv", "", resume), cell.world_size, run / "again"
    )
    assert ended.codes == [0] * cell.world_size, str(ended)
    values = read_values(run / "after.csv")
    assert sorted(values) == list(range(saved + 1, STEPS + 1))
    check_values(read_values(run / "before.csv") | values, expected, str(ended))
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.layout)
@pytest.mark.full
def test_f51_sigterm_saves_before_the_run_ends(cell: Cell, tmp_path: Path) -> None:
    in_fresh_process(told_to_end, tmp_path, cell, SIGTERM)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.layout)
@pytest.mark.full
def test_ctrl_c_saves_before_the_run_ends(cell: Cell, tmp_path: Path) -> None:
    in_fresh_process(told_to_end, tmp_path, cell, CTRL_C)


def interrupted_twice(run: Path) -> None:
    ended = start(
        fit_until_told, (Cell(pp=2), run, run / "before.csv", "Ctrl-C twice", None), 2, run / "logs"
    )
    assert set(ended.codes) == {-signal.SIGINT}, str(ended)
    assert max(read_values(run / "before.csv")) == TOLD_AT + 1, (
        "the first one has ended the fit in order"
    )
    assert check_checkpoints(run) == 0, "the second one does not wait for the save"


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    in_fresh_process(interrupted_twice, tmp_path)


# SLURM

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
ls -d {folder}/hpc_ckpt_* >> {log}
kill -TERM $PPID
"""


def fit_under_slurm(cell: Cell, run: Path, values: Path, number: int | None) -> None:
    """As srun starts it, with a job that may be requeued."""
    rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
    facts = {
        "PROCID": rank,
        "LOCALID": rank,
        "NTASKS": count,
        "NTASKS_PER_NODE": count,
        "JOB_ID": "4711",
        "NODEID": "0",
        "NNODES": "1",
    }
    os.environ.update(
        {f"SLURM_{name}": value for name, value in facts.items()} | {"SLURM_JOB_NAME": "train"}
    )
    os.environ["PATH"] = f"{run / 'bin'}:{os.environ['PATH']}"
    callbacks: list[pl.Callback] = [
        SlowSaves(),
        *([SendSignal(number)] if number else []),
        saver(run),
    ]
    environment = SLURMEnvironment(auto_requeue=True)
    fit(cell, STEPS, values, callbacks, trainer={"plugins": [environment], "default_root_dir": run})


def requeued(tmp_path: Path) -> None:
    cell = Cell(pp=2)
    expected = undisturbed(cell, STEPS, tmp_path / "undisturbed")
    run, script, log = tmp_path / "run", tmp_path / "run" / "bin" / "scontrol", tmp_path / "log"
    script.parent.mkdir(parents=True)
    script.write_text(SCONTROL.format(log=log, folder=run))
    script.chmod(0o755)
    ended = start(
        fit_under_slurm, (cell, run, tmp_path / "before.csv", signal.SIGUSR1), 2, tmp_path / "logs"
    )
    assert set(ended.codes) == {128 + signal.SIGTERM}, str(ended)
    saved = run / "hpc_ckpt_1.ckpt"
    assert log.read_text().splitlines() == [
        "requeue 4711",
        str(saved),
    ], "the checkpoint is there before the job may be ended"
    assert check_checkpoints(run, "hpc_*") == TOLD_AT + 1
    # as a killed save leaves it; Lightning takes its number for the newest
    (run / ".hpc_ckpt_2.ckpt.saving").mkdir()
    ended = start(fit_under_slurm, (cell, run, tmp_path / "after.csv", None), 2, tmp_path / "again")
    assert ended.codes == [0, 0], str(ended)
    values = read_values(tmp_path / "after.csv")
    assert sorted(values) == list(range(TOLD_AT + 2, STEPS + 1)), (
        "it went on from there without being told"
    )
    check_values(read_values(tmp_path / "before.csv") | values, expected, str(ended))


@pytest.mark.full
def test_f51_slurm_requeues_a_job_that_has_saved(tmp_path: Path) -> None:
    in_fresh_process(requeued, tmp_path)


# The end of a fit, and what goes on from it


def fit_and_go_on(run: Path) -> None:
    """Three fits, each from what the one before has left in the background."""
    cell = Cell(dp=2, zero=2)
    patch = pytest.MonkeyPatch()
    write = TensorSave.write
    patch.setattr(TensorSave, "write", lambda save, folder: time.sleep(0.3) or write(save, folder))
    try:
        options = {"monitor": "step", "mode": "max", "save_top_k": 2, "save_last": True}
        first = fit(cell, 5, run / "first.csv", [saver(run, **options)])
        kept = (
            sorted(path.name for path in (run / "checkpoints").iterdir())
            if first.is_global_zero
            else []
        )
        assert not first.is_global_zero or kept == ["last.ckpt", "step_2.ckpt", "step_4.ckpt"], kept
        fit(cell, 7, run / "last.csv", [saver(run, **options)], "last")
        best = saver(run, **options)
        trainer = fit(cell, 9, run / "third.csv", [best], "last")
        assert best.best_model_path.endswith("step_8.ckpt")
        trainer.fit_loop.epoch_loop.max_steps = 12
        trainer.fit(trainer.lightning_module, datamodule=trainer.datamodule, ckpt_path="best")
    finally:
        patch.undo()


@pytest.mark.slow
def test_f39_last_and_best_are_whole_when_a_fit_ends(tmp_path: Path) -> None:
    run_ranks(fit_and_go_on, 2, tmp_path)
    expected = in_fresh_process(
        partial(undisturbed, Cell(dp=2, zero=2), 12), tmp_path / "undisturbed"
    )
    found = {name: read_values(tmp_path / f"{name}.csv") for name in ("first", "last", "third")}
    steps = {name: (min(values), max(values)) for name, values in found.items()}
    assert steps == {
        "first": (1, 5),
        "last": (5, 7),
        "third": (7, 12),
    }, "from step 4, 6, and then 8, which is the best"
    for name, values in found.items():
        check_values(values, expected, name)
    assert check_checkpoints(tmp_path) == 12
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [
        "last.ckpt",
        "step_10.ckpt",
        "step_12.ckpt",
        "step_8.ckpt",
    ], "Lightning keeps what a fit went on from"
