"""The processes of the ranks, as far as they can be seen from this machine. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a driver",
    "Z": "has ended",
}


def machine_name() -> str:
    """Identify this machine: containers on different machines may have the same host name."""
    boot = _BOOT_ID.read_text("utf-8").strip() if _BOOT_ID.is_file() else ""
    return f"{socket.gethostname()} {boot}"


@dataclass(frozen=True)
class Process:
    """The process of a rank.

    Attributes:
        host: name of its machine.
        pid: its number there.
        started: when it was started, in ticks since the machine was: a number may be used again.
        place: identifies the machine, and the container, in which this number belongs to this
            process.
    """

    host: str
    pid: int
    started: str
    place: str

    @classmethod
    def own(cls) -> Process:
        """Describe this process."""
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()), _place())

    def why_silent(self) -> str:
        """Say why it does not answer."""
        where = f"process {self.pid} on {self.host}"
        if self.place != _place():
            return f"{where} is stopped or hangs, or the machine is lost"
        if not self.is_here():
            return f"{where} has ended"
        return f"{where} {_STATES.get(_fields(self.pid)[0], 'runs, but holds the lock of Python')}"

    @property
    def is_stopped(self) -> bool:
        """Whether it is on this machine and stopped by a signal."""
        return self.is_here() and _fields(self.pid)[:1] == ["T"]

    def kill_if_here(self) -> None:
        """Kill it if it runs on this machine: a process that is stopped never ends by itself."""
        if self.is_here():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def is_here(self) -> bool:
        return self.place == _place() and bool(self.started) and _started(self.pid) == self.started


def _place() -> str:
    """Identify what numbers of processes belong to: those of two containers are independent."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{machine_name()} {namespace}"


def _fields(pid: int) -> list[str]:
    """Return the fields of Linux' /proc/PID/stat from the third on; none where there is no such
    process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _started(pid: int) -> str:
    fields = _fields(pid)
    return fields[19] if len(fields) > 19 else ""
