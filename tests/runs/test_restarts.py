"""Runs that are started again in their folder: when they are not."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.runs.restarts import RESTARTS_FILE, note_restart, read_restarts
from lightning_3d.app.runs.status import RunStatus
from lightning_3d.errors import ConfigError


def attempt(folder: Path, exit_code: int | None, reason: str = "") -> None:
    """What an attempt leaves: its status, with an exit code unless it was killed."""
    begun = RunStatus.begun()
    (begun if exit_code is None else begun.after(exit_code, reason)).write(folder)


def test_f52_run_that_fails_again_and_again_is_not_started_any_more(tmp_path: Path) -> None:
    for _ in range(2):
        attempt(tmp_path, 1, "ArithmeticError:\n  cannot go on")
        note_restart(tmp_path, 40, 3)
    attempt(tmp_path, 1, "ArithmeticError:\n  cannot go on")
    with pytest.raises(ConfigError) as refused:
        note_restart(tmp_path, 40, 3)
    assert (
        str(refused.value)
        == f"The run in {tmp_path} is not started again, because it has failed 3 times in a row"
        " after step 40, without a newer checkpoint. The last attempt: ArithmeticError: cannot"
        " go on. Repair the cause first. To try again anyway, set"
        " trainer.restarts_without_progress to a larger number, or to null."
    )
    assert len(read_restarts(tmp_path)) == 2
    note_restart(tmp_path, 40, None)
    note_restart(tmp_path, 60, 3)  # a newer checkpoint


def test_f52_killed_attempts_count_and_interrupted_ones_do_not(tmp_path: Path) -> None:
    attempt(tmp_path, None)
    note_restart(tmp_path, 0, 2)
    attempt(tmp_path, 143)
    note_restart(tmp_path, 0, 2)
    attempt(tmp_path, None)
    note_restart(tmp_path, 0, 2)
    attempt(tmp_path, None)
    with pytest.raises(
        ConfigError,
        match=r"2 times in a row before its first checkpoint.* it ended without recording why",
    ):
        note_restart(tmp_path, 0, 2)


def test_damaged_notes_are_left_out(tmp_path: Path) -> None:
    attempt(tmp_path, 1, "x")
    note_restart(tmp_path, 0, 9)
    with (tmp_path / RESTARTS_FILE).open("a") as file:
        file.write('{"time": 1}\nnothing\n')
    assert len(read_restarts(tmp_path)) == 1


HOLDER = """
import sys, time
from pathlib import Path
from lightning_3d.app.runs.folder import RunFolder
RunFolder.claim(Path(sys.argv[1]), numbered=False)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize(("seconds", "waits"), [(2.0, True), (60.0, False)])
def test_f54_lock_of_the_earlier_attempt_is_waited_for(
    seconds: float,
    waits: bool,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_3d.app.runs.folder.EARLIER_SECONDS", 4.0 if waits else 0.5)
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        replace(RunStatus.begun(), pid=holder.pid).write(folder)
        start = time.monotonic()
        try:
            if waits:
                assert RunFolder.reopen(folder, {}).path == folder
                assert time.monotonic() - start > 1
            else:
                with pytest.raises(ConfigError, match=f"in progress .process {holder.pid} "):
                    RunFolder.reopen(folder, {})
        finally:
            holder.kill()
    assert f"s for process {holder.pid} of " in capfd.readouterr().err
