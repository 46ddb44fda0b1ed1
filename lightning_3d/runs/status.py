"""`status.json` in a run folder: whether the run has begun, runs, or how it ended. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

STATUS_FILE = "status.json"

RUNNING = "running"
FINISHED = "finished"
FAILED = "failed"
INTERRUPTED = "interrupted"

_MOST_OF_A_REASON = 4000


@dataclass(frozen=True)
class RunStatus:
    """What a run folder says of its run.

    Attributes:
        status: running, finished, failed or interrupted.
        exit_code: None while it runs.
        started, ended: seconds since the epoch.
        pid, host: of the process that supervises the ranks, or of rank 0 under torchrun and SLURM.
        reason: what was said when it failed, where that is known.
    """

    status: str
    exit_code: int | None
    started: float
    ended: float | None
    pid: int
    host: str
    reason: str = ""

    @classmethod
    def begun(cls) -> RunStatus:
        """A run of this process that begins now."""
        return cls(RUNNING, None, time.time(), None, os.getpid(), socket.gethostname())

    def after(self, exit_code: int, reason: str = "") -> RunStatus:
        """The same run when it has ended."""
        status = FINISHED if exit_code == 0 else INTERRUPTED if exit_code > 128 else FAILED
        return replace(self, status=status, exit_code=exit_code, ended=time.time(), reason=reason[-_MOST_OF_A_REASON:])

    @property
    def seconds(self) -> float | None:
        return None if self.ended is None else self.ended - self.started

    def write(self, folder: Path, *, first: bool = False) -> None:
        """Write the file as a whole: a reader never sees a part of it.

        Args:
            first: raise FileExistsError where there is one already; of several processes that try at once, one succeeds.
        """
        path, draft = folder / STATUS_FILE, folder / f".{STATUS_FILE}.{socket.gethostname()}.{os.getpid()}"
        if first:
            path.touch(exist_ok=False)
        text = json.dumps(asdict(self), indent=2) + "\n"
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        except OSError:
            draft.unlink(missing_ok=True)
            if first or not path.exists():
                raise
            with path.open("r+", encoding="utf-8") as file:  # the disk is full: what the file has already is room enough
                file.write(text)
                file.truncate()


def read_status(folder: Path) -> RunStatus | None:
    """What the folder says; None where it says nothing that can be read."""
    try:
        return RunStatus(**json.loads((folder / STATUS_FILE).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
