"""What a run has left on this machine. Only what the run could have made counts: others may work
here too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

MARK = "LIGHTNING_3D_CHAOS"
"""Variable in the environment of all processes of a run, with the folder of the run."""

_CACHE = "torchinductor_"
"""Folder that torch makes for compiled code when it is imported, to keep it."""

_SHARED_MEMORY = "/dev/shm"
_LISTENS = "0A"  # state of a TCP socket in /proc/net/tcp


class Traces:
    """What is on this machine before a run, to compare with what is there after it.

    Args:
        folder: folder of the run; its `tmp` is the folder for temporary files (TMPDIR) of all
            processes of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tmp").mkdir()
        self._before = self._machine()

    def left(self) -> list[str]:
        """Processes, temporary files, shared memory and sockets of the run, while its folder, disk
        and nodes still exist."""
        found = self._twice(
            lambda: self._new(f"file {_SHARED_MEMORY}/", "listening port ", "socket ")
        )
        found += [f"process {number}: {words}" for number, words in self._processes().items()]
        return found + [
            f"file {path}"
            for path in sorted((self.folder / "tmp").glob("*"))
            if not path.name.startswith(_CACHE)
        ]

    def left_on_machine(self) -> list[str]:
        """Everything that is left when the folder, the disk and the nodes of the run have been
        removed."""
        return self._twice(lambda: self._new("") + [f"folder {self.folder}"] * self.folder.exists())

    def _new(self, *beginnings: str) -> list[str]:
        new = sorted(
            thing for thing in self._machine() - self._before if thing.startswith(beginnings)
        )
        return [thing for thing in new if self._could_be_ours(thing)]

    def _twice(self, look: Callable[[], list[str]]) -> list[str]:
        """Look again after a moment: a process of somebody else may have ended while its sockets
        were listed."""
        found = look()
        if found:
            time.sleep(1)
            again = look()
            found = [thing for thing in found if thing in again]
        return found

    def _machine(self) -> set[str]:
        things = {
            f"file {path}"
            for place in (_SHARED_MEMORY, "/tmp", "/run")
            for path in Path(place).glob("*")
        }
        things |= {f"network namespace {path.name}" for path in Path("/run/netns").glob("*")}
        things |= {f"network interface {path.name}" for path in Path("/sys/class/net").glob("*")}
        things |= {
            f"mount {line.split()[4]}"
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
        }
        return things | _sockets()

    def _could_be_ours(self, thing: str) -> bool:
        kind, _, name = thing.rpartition(" ")
        # which belongs to this run alone, if it may be mounted
        if kind == "listening port" or name.startswith(_SHARED_MEMORY):
            return True
        return any(word in name for word in (str(self.folder), f"l3d{os.getpid()}"))

    def _processes(self) -> dict[int, str]:
        """Processes of this run: with its mark in their environment or in its folder, both of which
        their children inherit."""
        mark = f"{MARK}={self.folder}".encode()
        found = {}
        for number in _numbers():
            try:
                here = os.readlink(f"/proc/{number}/cwd").startswith(str(self.folder))
                if number != os.getpid() and (
                    here or mark in Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
                ):
                    found[number] = (
                        Path(f"/proc/{number}/cmdline")
                        .read_bytes()
                        .replace(b"\0", b" ")
                        .decode(errors="replace")[:200]
                    )
            except OSError:  # it has ended, or belongs to another user
                continue
        return found


def _sockets() -> set[str]:
    """TCP ports on which something listens, and Unix sockets with a name, that belong to no other
    process that can be seen."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, user, _, number = line.split()[:10]
            if state == _LISTENS and int(user) == os.getuid():
                found[number] = f"listening port {int(address.rpartition(':')[2], 16)}"
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) > 7:
            found[words[6]] = f"socket {words[7]}"
    owned = _sockets_of_others()
    return {words for number, words in found.items() if number not in owned}


def _sockets_of_others() -> set[str]:
    """Numbers of the sockets that processes without the mark of a run hold."""
    owned: set[str] = set()
    for number in _numbers():
        try:
            if f"{MARK}=".encode() in Path(f"/proc/{number}/environ").read_bytes():
                continue
            links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{number}/fd")]
        except OSError:
            continue
        owned |= {link[8:-1] for link in links if link.startswith("socket:[")}
    return owned


def _numbers() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
