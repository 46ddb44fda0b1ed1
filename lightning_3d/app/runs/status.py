"""`status.json` in a run folder: whether the run is running, or how it ended. Imports nothing
heavy."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lightning_3d.storage.json_file import replace_text

STATUS_FILE = "status.json"

RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"
INTERRUPTED = "interrupted"

_MOST_OF_A_REASON = 4000


@dataclass(frozen=True)
class RunStatus:
    """Status of the run in a run folder.

    Attributes:
        status: running, finished, failed or interrupted.
        exit_code: exit code of the run; None while it runs.
        started: start, in seconds since the epoch.
        ended: end, in seconds since the epoch; None while it runs.
        pid: id of the process that supervises the ranks, or of rank 0 under torchrun and SLURM.
        host: host of that process.
        reason: message of the failure, if it is known.
        device: name of the GPUs of this host; empty for a run on CPU.
    """

    status: str
    exit_code: int | None
    started: float
    ended: float | None
    pid: int
    host: str
    reason: str = ""
    device: str = ""

    @classmethod
    def begun(cls, device: str = "") -> RunStatus:
        """Return the status of a run of this process that starts now."""
        return cls(
            RUNNING, None, time.time(), None, os.getpid(), socket.gethostname(), device=device
        )

    def after(self, exit_code: int, reason: str = "") -> RunStatus:
        """Return the status of the same run after its end."""
        status = FINISHED if exit_code == 0 else INTERRUPTED if exit_code > 128 else FAILED
        return replace(
            self,
            status=status,
            exit_code=exit_code,
            ended=time.time(),
            reason=reason[-_MOST_OF_A_REASON:],
        )

    @property
    def seconds(self) -> float | None:
        return None if self.ended is None else self.ended - self.started

    def write(self, folder: Path, *, first: bool = False) -> None:
        """Write the file atomically: a reader never sees a part of it.

        Args:
            first: raise FileExistsError if the file exists; of several processes that try at once,
                one succeeds.
        """
        path = folder / STATUS_FILE
        if first:
            path.touch(exist_ok=False)
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            replace_text(path, text)
        except OSError:
            if first or not path.exists():
                raise
            # the disk is full: overwrite in place, which needs no new room
            with path.open("r+", encoding="utf-8") as file:
                file.write(text)
                file.truncate()


def read_status(folder: Path) -> RunStatus | None:
    """Read the status in a folder; None if there is none, or it cannot be read."""
    try:
        return RunStatus(**json.loads((folder / STATUS_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
