"""The processes of the ranks, as far as they can be seen from this machine. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits for a disk or a driver", "Z": "has ended"}


@dataclass(frozen=True)
class Process:
    """The process of a rank.

    Attributes:
        host: name of its machine.
        pid: its number there.
        started: when it was started, in ticks since the machine was: a number may be used again.
    """

    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        """Describe this process."""
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()))

    def why_silent(self) -> str:
        """Say why it does not answer."""
        where = f"process {self.pid} on {self.host}"
        if self.host != socket.gethostname():
            return f"{where} is stopped or hangs, or the machine is lost"
        if not self._is_here():
            return f"{where} has ended"
        return f"{where} {_STATES.get(_fields(self.pid)[0], 'runs, but holds the lock of Python')}"

    def kill_if_here(self) -> None:
        """Kill it if it runs on this machine: a process that is stopped never ends by itself."""
        if self._is_here():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _is_here(self) -> bool:
        return self.host == socket.gethostname() and bool(self.started) and _started(self.pid) == self.started


def _fields(pid: int) -> list[str]:
    """Return the fields of Linux' /proc/PID/stat from the third on; none where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 else ""
