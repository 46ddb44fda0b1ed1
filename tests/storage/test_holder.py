"""Who works in a folder: a second run is told the process, since when and what to do, and never to
remove what may be alive."""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import environment

from lightning_3d.app.runs.folder import RunFolder, in_progress
from lightning_3d.app.runs.status import FAILED, FINISHED, RUNNING, RunStatus
from lightning_3d.app.runs.sweep.folder import SweepFolder
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.storage.holder import LockHolder, moment
from lightning_3d.storage.lock import FileLock, FolderLock, is_held

WORKS = """
import sys, time
from pathlib import Path
from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.runs.status import RunStatus
from lightning_3d.app.runs.sweep.folder import SweepFolder
from lightning_3d.storage.lock import FolderLock
path = Path(sys.argv[1])
folder = RunFolder.claim(path / "run", numbered=False)
RunStatus.begun().write(folder.path)
kept = FolderLock(path / "checkpoints"), SweepFolder.take(path / "sweep", numbered=False)
print("works", flush=True)
time.sleep(600)
"""


@contextmanager
def other_run(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that works in `path`/run, checkpoints and sweep."""
    command = [sys.executable, "-c", WORKS, str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "works\n"
        try:
            yield process
        finally:
            process.kill()


def refusal(path: Path, option: str = "hydra.run.dir") -> str:
    with pytest.raises(ConfigError) as error:
        RunFolder.claim(path, numbered=False, option=option)
    assert "remove" not in str(error.value) and "delete" not in str(error.value)
    return str(error.value)


def test_a_folder_in_which_another_process_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_run(tmp_path) as process:
        me = LockHolder.this_process()
        since = (
            rf"process {process.pid} of {me.user} on {me.host}, since"
            rf" {time.strftime('%Y')}-\d\d-\d\d \d\d:\d\d:\d\d"
        )
        do = rf"\. Wait until it ends, stop it \(kill {process.pid}\), or set "
        run = tmp_path / "run"
        with pytest.raises(
            ConfigError,
            match=(
                rf"run belongs to a run that is in progress \({since}\){do}hydra.run.dir to another"
                r" folder"
            ),
        ):
            RunFolder.claim(run, numbered=False)
        refusal(run)
        monkeypatch.setattr("lightning_3d.app.runs.folder.EARLIER_SECONDS", 0.1)
        with pytest.raises(
            ConfigError,
            match=rf"run belongs to a run that is in progress \({since}\){do}another folder",
        ):
            RunFolder.reopen(run, {})
        with pytest.raises(ConfigError, match=rf"already holds a run \(status: running; {since}\)"):
            RunFolder.adopt(run)
        with pytest.raises(
            ConfigError,
            match=(
                rf"Another sweep is in progress in {tmp_path}/sweep \({since}\){do}hydra.sweep.dir"
            ),
        ):
            SweepFolder.take(tmp_path / "sweep", numbered=False)
        monkeypatch.setattr("lightning_3d.storage.lock._PATIENCE_SECONDS", 0)
        with pytest.raises(
            CheckpointError,
            match=(
                rf"belongs to another run that has not ended \({since}\)\. Two runs .*{do}another"
            ),
        ):
            FolderLock(tmp_path / "checkpoints")
        assert in_progress(run) and RunFolder.claim(run, numbered=True).path.name == "run_1"
    assert in_progress(run) is False and is_held(run / ".lock") is False
    said = refusal(run)
    assert (
        f"whose process ended without recording why (process {process.pid} of {me.user} on"
        f" {me.host}" in said
    )
    assert said.endswith(
        "Set hydra.run.dir to a new folder. To resume that run, set trainer.auto_resume=true."
    )
    assert RunFolder.reopen(run, {}).path == run, (
        "a lock that is left of a killed process holds nobody up"
    )


def left_by(folder: Path, status: str, host: str | None = None, pid: int | None = None) -> None:
    """What a run leaves."""
    begun = RunStatus.begun()
    ended = None if status == RUNNING else begun.started + 60
    path = folder / "config.yaml"
    folder.mkdir()
    path.touch()
    RunStatus(
        status, 0, begun.started, ended, pid if pid is not None else begun.pid, host or begun.host
    ).write(folder)


@pytest.mark.parametrize("status", [FINISHED, FAILED])
def test_a_folder_of_a_run_that_has_ended(status: str, tmp_path: Path) -> None:
    left_by(tmp_path / "run", status)
    when = moment(json.loads((tmp_path / "run" / "status.json").read_text())["ended"])
    said = refusal(tmp_path / "run")
    assert said.startswith(
        f"{tmp_path}/run holds the files of another run ({status}, {when}). Set hydra.run.dir to a"
        " new folder."
    )
    assert refusal(tmp_path / "run", "--folder").endswith(". Set --folder to a new folder.")


def test_a_folder_of_a_run_on_another_host(tmp_path: Path) -> None:
    left_by(tmp_path / "run", RUNNING, "node7", 4711)
    assert in_progress(tmp_path / "run") is None
    said = refusal(tmp_path / "run")
    assert "which was in progress on another host (process 4711 on node7, since " in said
    assert "Check there whether it has ended, or set" in said


def test_a_folder_without_locks_is_judged_by_the_process(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left_by(tmp_path / "dead", RUNNING, pid=dead.pid)
    left_by(tmp_path / "alive", RUNNING, pid=os.getppid())
    assert (in_progress(tmp_path / "dead"), in_progress(tmp_path / "alive")) == (False, True)


def test_what_no_lock_says() -> None:
    assert (
        LockHolder.of({"process": "x", "host": "h"}) is None
        and LockHolder.of(None) is None
        and LockHolder.of({"host": "h"}) is None
    )
    elsewhere = LockHolder.of({"process": 3, "host": "node7", "beat": 1})
    assert elsewhere is not None and elsewhere.describe() == "process 3 on node7"
    assert (
        elsewhere.what_to_do("wait more")
        == "Wait until it ends, stop it (kill 3 on node7), or wait more."
    )
    assert LockHolder.of(LockHolder.this_process().facts()) is not None


def test_a_forked_rank_neither_has_nor_frees_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.acquire() and is_held(tmp_path / "lock")
    ready, release = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        taken = FileLock(tmp_path / "lock").acquire()
        os.write(ready[1], b"1" if taken else b"0")
        os.read(release[0], 1)
        os._exit(0)
    assert os.read(ready[0], 1) == b"0", "the parent has it"
    lock.release()
    assert is_held(tmp_path / "lock") is False, "although the child still lives"
    os.write(release[1], b"1")
    os.waitpid(child, 0)


def test_a_file_system_without_locks_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    assert FileLock(tmp_path / "lock").acquire() and FileLock(tmp_path / "lock").acquire()
    assert is_held(tmp_path / "lock") is None
    named = LockHolder.read(tmp_path / "lock")
    assert named is not None and named.process == os.getpid()
