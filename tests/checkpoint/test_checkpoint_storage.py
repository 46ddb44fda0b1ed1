"""f32, f33: a disk that is full, slow, read-only, or does not answer, during a fit with several
ranks."""

import contextlib
import itertools
import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from command_line import run_here
from lightning.pytorch.callbacks import ModelCheckpoint
from parity import Cell
from quick_runs import QUICK
from ranks import run_ranks
from saving import check_checkpoints, check_values, fit, read_values, undisturbed
from starts import in_fresh_process, read_only, small_disk, start
from sweeps import by_default

from lightning_3d.app.runs.status import read_status
from lightning_3d.checkpoint import folder
from lightning_3d.checkpoint.hashes import HashedFile
from lightning_3d.checkpoint.outcome import NotSaved
from lightning_3d.checkpoint.writing import TensorSave
from lightning_3d.errors import CheckpointError, StorageHangs
from lightning_3d.strategy.checkpoint_space import checkpoint_bytes

DISK = 64 * 2**20
FOUR = Cell(tp=2, dp=2, zero=1)
TWO = Cell(dp=2, zero=2)


def saver(run: Path, every: int = 2, **options: Any) -> ModelCheckpoint:
    defaults = {"filename": "step_{step}", "auto_insert_metric_name": False, "save_top_k": -1}
    return ModelCheckpoint(
        run / "checkpoints", every_n_train_steps=every, **{**defaults, **options}
    )


def with_disk(tmp_path: Path, test: Callable[..., Any], *arguments: Any) -> Any:
    """Call `test(folder, ...)` in a fresh process, where a disk of its own is at folder /
    "disk"."""
    result = in_fresh_process(mounted, tmp_path, test, arguments)
    if isinstance(result, PermissionError):
        pytest.skip(f"this machine does not let a file system be mounted: {result.strerror}")
    return result


def mounted(tmp_path: Path, test: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(small_disk(tmp_path / "disk", DISK))
        except PermissionError as error:
            return error
        return test(tmp_path, *arguments)


# Full


class FillDisk(pl.Callback):
    """Leaves room for half a checkpoint after step 3, and for all after step 5."""

    def __init__(self, disk: Path) -> None:
        self.disk, self.filler = disk, disk / "filler"

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.strategy._store.wait()  # type: ignore[attr-defined]  # so that the save after step 2 is not hit
        if trainer.is_global_zero and trainer.global_step == 3:
            self.fill()
        if trainer.is_global_zero and trainer.global_step == 5:
            self.filler.unlink()
        trainer.strategy.barrier()

    def fill(self) -> None:
        size = sum(
            file.stat().st_size for file in (self.disk / "checkpoints" / "step_2.ckpt").iterdir()
        )
        os.sync()
        space = os.statvfs(self.disk)
        self.filler.write_bytes(bytes(space.f_bavail * space.f_frsize - size // 2))


def fit_on_a_full_disk(cell: Cell, disk: Path, values: Path, asynchronous: bool) -> None:
    filler = FillDisk(disk)
    trainer = fit(cell, 8, values, [filler, saver(disk)], checkpoint_asynchronous=asynchronous)
    if trainer.is_global_zero:
        filler.fill()
    trainer.strategy.barrier()
    with pytest.raises(CheckpointError, match="No space left on device") as refused:
        trainer.save_checkpoint(disk / "more" / "after.ckpt")
    assert "after.ckpt" in str(refused.value) and "\n" not in str(refused.value)
    if trainer.is_global_zero:
        assert not list((disk / "more").iterdir()), "nothing is left of it"
        filler.filler.unlink()
    trainer.strategy.barrier()
    trainer.save_checkpoint(disk / "more" / "after.ckpt")


def full_disk(tmp_path: Path, cell: Cell, asynchronous: bool) -> tuple[list[str], str]:
    expected = undisturbed(cell, 8, tmp_path / "undisturbed")
    disk, values = tmp_path / "disk", tmp_path / "values.csv"
    ended = start(
        fit_on_a_full_disk, (cell, disk, values, asynchronous), cell.world_size, tmp_path / "logs"
    )
    assert ended.codes == [0] * cell.world_size, str(ended)
    assert sorted(read_values(values)) == list(range(1, 9))
    check_values(read_values(values), expected, str(ended))
    assert check_checkpoints(disk) == 8
    return sorted(path.name for path in (disk / "checkpoints").iterdir()), ended.output[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cell", "asynchronous"),
    by_default([(TWO, True), (FOUR, True), (FOUR, False)], 0),
    ids=["two", "four", "four, synchronous"],
)
def test_f32_training_goes_on_when_the_disk_is_full(
    cell: Cell, asynchronous: bool, tmp_path: Path
) -> None:
    names, output = with_disk(tmp_path, full_disk, cell, asynchronous)
    assert names == [
        "step_2.ckpt",
        "step_6.ckpt",
        "step_8.ckpt",
    ], "nothing is left of the save that failed"
    said = re.findall(
        r"Checkpoint \S+/(\S+) could not be written; training continues without it: (.*)", output
    )
    assert [name for name, _ in said] == ["step_4.ckpt"], output
    assert "No space left on device" in said[0][1]


class LeaveRoom(pl.Callback):
    """Leaves room for half a checkpoint after step 3, and never more."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        FillDisk.on_train_batch_end(self, trainer) if trainer.global_step <= 3 else None  # type: ignore[arg-type]

    def __init__(self, disk: Path) -> None:
        self.disk, self.filler = disk, disk / "filler"

    fill = FillDisk.fill


def fit_that_ends_on_a_full_disk(disk: Path, values: Path) -> None:
    """The end of a fit is an error, but what it trained is not lost: the script may save it
    elsewhere."""
    seen: list[pl.Trainer] = []

    class Remember(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, *args: Any) -> None:
            seen.append(trainer)

    try:
        fit(TWO, 4, values, [LeaveRoom(disk), Remember(), saver(disk)])
    except NotSaved:
        seen[0].save_checkpoint(values.parent / "elsewhere" / "step_4.ckpt")
        assert seen[0].strategy.save_outcome.saved.step == 4  # type: ignore[attr-defined]
        raise


def ends_on_a_full_disk(tmp_path: Path) -> None:
    disk, values = tmp_path / "disk", tmp_path / "values.csv"
    ended = start(fit_that_ends_on_a_full_disk, (disk, values), 2, tmp_path / "logs")
    assert ended.codes == [1, 1], str(ended)
    said = ended.told[0]
    assert re.match(
        r"lightning_3d: Training ended at step 4, but its checkpoint \S+/step_4.ckpt could not be"
        r" written: ",
        said,
    ), said
    assert "No space left on device" in said
    assert said.endswith(
        f"\nThe newest complete checkpoint is {disk}/checkpoints/step_2.ckpt (step 2)."
    ), said
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step_2.ckpt"]
    assert check_checkpoints(tmp_path, "elsewhere/[!.]*") == 4


@pytest.mark.slow
def test_a_fit_whose_last_save_failed_does_not_end_as_if_saved(tmp_path: Path) -> None:
    with_disk(tmp_path, ends_on_a_full_disk)


def too_little_room(tmp_path: Path) -> None:
    disk, values = tmp_path / "disk", tmp_path / "values.csv"
    (disk / "filler").write_bytes(bytes(DISK - 2**20))
    ended = start(fit, (TWO, 20, values, [saver(disk, save_top_k=-1)]), 2, tmp_path / "logs")
    assert ended.codes == [2, 2] and not values.exists(), str(ended)
    units = {"kB": 1e3, "MB": 1e6}
    size, needed, free = (
        float(number) * units[unit]
        for number, unit in re.findall(r"([\d.]+) ([kM]B)", ended.told[0])
    )
    assert (
        f"do not fit in {disk}/checkpoints: each takes " in ended.told[0]
        and "up to 10 exist at once" in ended.told[0]
    ), ended.told
    assert needed == pytest.approx(10 * size, rel=0.01) and free == pytest.approx(1e6, rel=0.1)
    ended = start(fit, (TWO, 2, values, [saver(disk, save_top_k=-1)]), 2, tmp_path / "again")
    assert ended.codes == [0, 0], f"one fits, and no more are to be saved: {ended}"


@pytest.mark.slow
def test_a_fit_whose_checkpoints_cannot_fit_is_refused_before_its_first_step(
    tmp_path: Path,
) -> None:
    with_disk(tmp_path, too_little_room)


def command_lines(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    filler, run = disk / "filler", f"hydra.run.dir={disk / 'new' / 'run'}"
    filler.write_bytes(bytes(DISK))
    [full] = run_here([["train", *QUICK, run]])
    message = (
        f"lightning_3d: Cannot create the run folder {disk / 'new' / 'run'}: No space left on"
        " device."
    )
    message += " Set hydra.run.dir to another folder.\n"
    assert (full.code, full.output) == (2, message)
    assert [path.name for path in disk.iterdir()] == ["filler"], "nothing is left"
    filler.write_bytes(bytes(DISK - 700 * 2**10))
    line = ["train", *QUICK, run, "trainer.checkpoint_every_n_steps=1"]
    refused, failed = run_here([line, [*line, "force=true"]])
    assert refused.code == 2 and refused.output.count("lightning_3d: ") == 1, refused.output
    assert (
        re.search(r"each takes (3[5-9]|4[0-4])\d kB, and up to 2 exist at once", refused.output)
        and "force=true" in refused.output
    )
    assert failed.code == 1 and "Traceback" not in failed.output, failed.output
    newest = disk / "new" / "run" / "checkpoints" / "step_1.ckpt"
    assert (
        f"checkpoint         {newest} (step 1); the checkpoint of step 2 could not be written"
        in failed.output
    ), failed.output
    assert (
        failed.output.count("No space left on device") >= 1
        and f"  checkpoint: {newest} (step 1)\n  resume: " in failed.output
    )
    status = read_status(disk / "new" / "run")
    assert status is not None and (status.status, status.exit_code) == ("failed", 1)
    assert (
        "could not be written" in status.reason
        and f"The newest complete checkpoint is {newest} (step 1)." in status.reason
    )


@pytest.mark.slow
def test_full_disks_on_the_command_line(tmp_path: Path) -> None:
    with_disk(tmp_path, command_lines)


class Predict(pl.Callback):
    """What `require_space` takes for the size of a checkpoint, before the first step."""

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        mesh, backend = strategy.mesh, strategy.built.backend
        _, self.everything = checkpoint_bytes(
            trainer.lightning_module, strategy.specs, mesh, trainer.optimizers, backend
        )


SIZED = [
    (TWO, "32-true"),
    (Cell(tp=2, zero=1), "bf16-true"),
    (Cell(pp=2), "32-true"),
    (Cell(dp=2, zero=3), "bf16-true"),
]


def predicted_and_written(run: Path) -> list[tuple[int, int]]:
    sizes = []
    for cell, precision in SIZED:
        predict, folder = Predict(), run / f"{cell.name} {precision}"
        fit(cell, 2, run / "values.csv", [predict, saver(folder)], trainer={"precision": precision})
        manifest = json.loads(
            (folder / "checkpoints" / "step_2.ckpt" / "manifest.json").read_text()
        )
        sizes.append((predict.everything, manifest["tensor_bytes"]))
    return sizes


@pytest.mark.slow
def test_the_size_of_a_checkpoint_is_known_before_the_first_step(tmp_path: Path) -> None:
    for sizes in run_ranks(predicted_and_written, 2, tmp_path):
        for (cell, _), (predicted, written) in zip(SIZED, sizes, strict=True):
            assert 0 <= written - predicted < 34_000 * cell.dp, (
                "random number generators and step counts come on top"
            )


# Read-only


def read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    (disk / "there" / "checkpoints").mkdir(parents=True)
    read_only(disk)
    for name in ("there", "not there yet"):
        values = tmp_path / f"{name}.csv"
        ended = start(fit, (TWO, 4, values, [saver(disk / name)]), 2, tmp_path / name)
        assert ended.codes == [2, 2], str(ended)
        assert f"Cannot write checkpoints to {disk / name / 'checkpoints'}: " in ended.told[0], (
            ended.told
        )
        assert "\n" not in ended.told[0] and "read-only" in ended.told[0].lower()
        assert not values.exists(), "not a step was made"


@pytest.mark.slow
def test_f33_a_read_only_folder_is_refused_before_training(tmp_path: Path) -> None:
    with_disk(tmp_path, read_only_disk)


# Slow


class Watched(pl.Callback):
    """A slow disk, and what is in memory and under way for it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.memory: list[list[int]] = []
        self.under_way = self.most = 0

    def on_fit_start(self, trainer: pl.Trainer, *args: Any) -> None:
        write, stage = TensorSave.write, TensorSave.stage

        def slow(save: Any, where: Path) -> Any:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            time.sleep(self.seconds if trainer.global_rank == 1 else 0)
            self.under_way -= 1
            return write(save, where)

        def staged(save: Any, buffers: Any) -> None:
            stage(save, buffers)
            self.memory.append(sorted(buffer.data_ptr() for buffer in buffers.values()))

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(TensorSave, "write", slow)
        self.patch.setattr(TensorSave, "stage", staged)

    def on_fit_end(self, *args: Any) -> None:
        self.patch.undo()


def fit_on_a_slow_disk(run: Path) -> tuple[list[str], int, list[list[int]]]:
    watched = Watched(1.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(TWO, 4, run / "values.csv", [watched, saver(run, every=1)])
    return (
        [str(warning.message) for warning in caught if "Training waited" in str(warning.message)],
        watched.most,
        watched.memory,
    )


@pytest.mark.full
def test_f33_a_slow_disk_holds_training_up_and_takes_no_more_memory(tmp_path: Path) -> None:
    (said, *first), (silent, *second) = run_ranks(fit_on_a_slow_disk, 2, tmp_path)
    assert len(said) == 1 and not silent, "told once, by rank 0"
    assert re.search(r"waited \d+\.\d s for checkpoint \S*step_1.ckpt: saves come faster", said[0])
    for most, memory in (first, second):
        assert most == 1, "one save at a time"
        assert len(memory) == 4 and memory[0] and all(used == memory[0] for used in memory)
    assert check_checkpoints(tmp_path) == 4


# Hanging


class Hang(pl.Callback):
    """The disk of rank 1 does not answer any more, from the second save on, when a file is to be
    flushed."""

    def on_fit_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1:
            write, saves = TensorSave.write, itertools.count(1)

            def hanging(save: Any, where: Any) -> Any:
                if next(saves) == 2:
                    HashedFile.close = lambda file: threading.Event().wait()  # type: ignore[method-assign, assignment]
                return write(save, where)

            TensorSave.write = hanging  # type: ignore[method-assign]


def fit_on_a_disk_that_hangs(
    run: Path, values: Path, hangs: bool, asynchronous: bool, resume: str | None = None
) -> None:
    callbacks = [Hang()] if hangs else []
    options = {"checkpoint_timeout_seconds": 6.0, "checkpoint_asynchronous": asynchronous}
    fit(TWO, 8, values, [*callbacks, saver(run)], resume, **options)


def hanging_disk(run: Path, asynchronous: bool) -> None:
    expected = undisturbed(TWO, 8, run / "undisturbed")
    arguments = (run, run / "hangs.csv", True, asynchronous)
    ended = start(fit_on_a_disk_that_hangs, arguments, 2, run / "logs")
    assert ended.codes == [1, 1], str(ended)
    told = [
        text for text in ended.told if "step_4.ckpt has not finished 6 s after it started" in text
    ]
    assert told, ended
    assert re.search(
        r"rank 1: checkpoint \S+ has not finished 6 s after it started: writing \S+/__1_0.distcp",
        told[0],
    ), told
    assert re.search(
        r"rank 0: checkpoint \S+ has not finished 6 s after it started: waiting for other ranks",
        told[0],
    ), told
    assert check_checkpoints(run) == 2
    arguments = (
        run,
        run / "goes_on.csv",
        False,
        asynchronous,
        str(run / "checkpoints" / "step_2.ckpt"),
    )
    ended = start(fit_on_a_disk_that_hangs, arguments, 2, run / "again")
    assert ended.codes == [0, 0], str(ended)
    values = read_values(run / "goes_on.csv")
    assert sorted(values) == list(range(3, 9))
    check_values(values, expected, str(ended))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step_{step}.ckpt" for step in (2, 4, 6, 8)
    ]


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [True, False])
def test_f33_a_save_that_hangs_ends_the_run_and_names_rank_and_file(
    asynchronous: bool, tmp_path: Path
) -> None:
    in_fresh_process(hanging_disk, tmp_path, asynchronous)


def test_f33_a_folder_that_cannot_be_made_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plain_checkpoints import save

    from lightning_3d.checkpoint import CheckpointStore, SaveMode
    from lightning_3d.options.checkpoints import CheckpointOptions

    gone = threading.Event()
    monkeypatch.setattr(folder, "begin", lambda *args, **kwargs: gone.wait(60))
    with pytest.raises(
        StorageHangs, match=f"Starting checkpoint {tmp_path / 'a'} has not finished after 1 s"
    ):
        save(
            tmp_path / "a",
            1,
            CheckpointStore(CheckpointOptions(checkpoint_timeout_seconds=1.0)),
            mode=SaveMode.BACKGROUND,
        )
    gone.set()
