"""Restarts of a run in its folder, and an end to those that get nowhere. Imports no torch.

A job that always fails at the same place would be restarted forever by torchrun, SLURM or a script.
Each restart is noted in the run folder with the step that it resumes; a run that has failed several
times in a row without a new checkpoint is not started again.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_3d.app.runs.status import FINISHED, INTERRUPTED, RunStatus, read_status
from lightning_3d.errors import ConfigError

RESTARTS_FILE = "restarts.jsonl"
MOST_WITHOUT_PROGRESS = 5
"""Attempts that may fail in a row at the same checkpoint, unless the caller sets another number."""

_MOST_OF_A_REASON = 300


@dataclass(frozen=True)
class Restart:
    """A restart of a run.

    Attributes:
        time: when, in seconds since the epoch.
        step: step of the checkpoint that was the newest then; 0 for none.
        reason: why the attempt before ended; empty if a signal ended it.
    """

    time: float
    step: int
    reason: str


def note_restart(folder: Path, step: int, most: int | None) -> None:
    """Note that a run is restarted, and refuse it if the last attempts have failed at the same
    step.

    Args:
        folder: run folder.
        step: step of the newest checkpoint; 0 for none.
        most: number of attempts that may fail in a row without a new checkpoint; None for any
            number.

    Raises:
        ConfigError: it has failed that often. Nothing is noted then.
    """
    restart = Restart(time.time(), step, _why_ended(read_status(folder)))
    failed = [restart, *reversed(read_restarts(folder))]
    in_a_row = next(
        (place for place, one in enumerate(failed) if one.step != step or not one.reason),
        len(failed),
    )
    if most is not None and in_a_row >= most:
        raise ConfigError(
            f"The run in {folder} is not started again, because it has failed {in_a_row} times in a"
            f" row {f'after step {step}' if step else 'before its first checkpoint'}, without a"
            f" newer checkpoint. The last attempt: {restart.reason} Repair the cause first. To try"
            " again anyway, set trainer.restarts_without_progress to a larger number, or to null."
        )
    with (folder / RESTARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(restart)) + "\n")


def read_restarts(folder: Path) -> list[Restart]:
    """Read the restarts of a run, oldest first. Lines that are damaged are left out."""
    try:
        lines = (folder / RESTARTS_FILE).read_text("utf-8").splitlines()
    except OSError:
        return []
    found: list[Restart] = []
    for line in lines:
        try:
            found.append(Restart(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def _why_ended(status: RunStatus | None) -> str:
    """Say why an attempt ended; empty where nothing was wrong with it."""
    if status is None or status.status in (FINISHED, INTERRUPTED):
        return ""
    reason = " ".join(status.reason.split())[:_MOST_OF_A_REASON]
    if status.ended is None:
        return "it ended without recording why (killed, or its machine was lost)."
    return reason if reason.endswith(".") else f"{reason or f'exit code {status.exit_code}'}."
