"""The process that holds a lock, as its lock file names it. Imports nothing heavy."""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LockHolder:
    """A process that holds a lock.

    Attributes:
        process: process id on `host`.
        host: host name.
        user: owner of the process; empty where it is not known.
        since: time of locking, in seconds since the epoch; 0 where it is not known.
    """

    process: int
    host: str
    user: str = ""
    since: float = 0.0

    @classmethod
    def this_process(cls) -> LockHolder:
        """Return this process as a holder from now on."""
        try:
            user = getpass.getuser()
        except (OSError, KeyError):  # a user id without a name, as in some containers
            user = ""
        return cls(os.getpid(), socket.gethostname(), user, time.time())

    @classmethod
    def of(cls, marker: Any) -> LockHolder | None:
        """Return the holder that a marker names, whatever else is in it; None where it names
        none."""
        if not (
            isinstance(marker, Mapping)
            and isinstance(marker.get("process"), int)
            and isinstance(marker.get("host"), str)
        ):
            return None
        since = marker.get("since", 0.0)
        return cls(
            marker["process"],
            marker["host"],
            str(marker.get("user", "")),
            since if isinstance(since, (int, float)) else 0.0,
        )

    @classmethod
    def read(cls, path: Path) -> LockHolder | None:
        """Return the holder that a lock file names; None where it names none."""
        try:
            return cls.of(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError):
            return None

    def facts(self) -> dict[str, Any]:
        """Return the facts that `of` reads."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Name this holder in a lock file. On a full disk the name is missing, but the lock
        holds."""
        with suppress(OSError):
            path.write_text(json.dumps(self.facts()), "utf-8")

    @property
    def is_here(self) -> bool:
        """True if it is, or was, a process of this host."""
        return self.host == socket.gethostname()

    @property
    def exists(self) -> bool:
        """True if a process of this host has its id."""
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except OSError:  # the process of another user
            return True
        return True

    def describe(self) -> str:
        """Describe the holder: `process 4711 of ann on node3, since 2026-01-31 12:00:00`."""
        owner = f" of {self.user}" if self.user else ""
        since = f", since {moment(self.since)}" if self.since else ""
        return f"process {self.process}{owner} on {self.host}{since}"

    def what_to_do(self, other: str) -> str:
        """Advise a second run what to do while this holder works.

        Args:
            other: how to use another folder, for example "set hydra.run.dir to another folder".
        """
        return (
            "Wait until it ends, stop it (kill"
            f" {self.process}{'' if self.is_here else f' on {self.host}'}), or {other}."
        )


def moment(seconds: float) -> str:
    """Write a time as people do, in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
