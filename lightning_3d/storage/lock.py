"""Locks of files: one process at a time works in a folder, and the kernel frees its lock however
the process ends. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import filelock

from lightning_3d.errors import CheckpointError, StorageError, reason
from lightning_3d.storage.holder import LockHolder
from lightning_3d.storage.remote_path import Place, RemotePath

_NAME = ".lightning_3d.lock"
_PATIENCE_SECONDS = 5.0
"""Time for an earlier attempt of the same run to end."""

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks, as some clusters mount them."""

_kept: dict[tuple[int, Path], FileLock] = {}
"""Locks that a process keeps until it ends, by its id: a forked child has none of its parent's
locks."""


class FileLock:
    """A lock of a file (flock, also over NFS), held until `release` or the end of the process.
    Forked children do not inherit it.

    On a file system without locks it is always acquired, so it protects nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A soft lock, which filelock would use where there is no flock, survives a process that is
        # killed.
        self._lock = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)

    def acquire(self) -> bool:
        """Try once, and name this process in the file. Returns False where another holder has it.

        Raises:
            OSError: the file cannot be opened for writing.
        """
        # filelock takes some errors of opening the file for a lock that another process holds.
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644))
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        LockHolder.this_process().write(self.path)
        return True

    def release(self, *, remove: bool = False) -> None:
        """Free the lock. Later calls do nothing.

        Args:
            remove: whether to remove the file too. It is removed while the lock is held, so that a
                waiting process notices that the file is gone.
        """
        if remove:
            self.path.unlink(missing_ok=True)
        self._lock.release()


def keep(path: Path) -> bool:
    """Acquire the lock of a file until this process ends. Returns True also where this process has
    it already.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    key = os.getpid(), path.absolute()
    if key in _kept:
        return True
    lock = FileLock(path)
    if not lock.acquire():
        return False
    _kept[key] = lock
    return True


def is_held(path: Path) -> bool | None:
    """Check whether a process holds the lock of a file; None where the file or the file system does
    not show it."""
    if not path.is_file():
        return None
    probe = filelock.FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        probe.acquire(blocking=False)
    except filelock.Timeout:
        return True
    except OSError:
        return None
    probe.release()
    return False


def hold(folder: Place, patience_seconds: float | None = None) -> FolderLock | Lease:
    """Hold a folder of checkpoints, on the disk or at a URL. Raises as `FolderLock` and `Lease`
    do."""
    if isinstance(folder, RemotePath):
        return Lease(folder, _PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
    return FolderLock(folder, patience_seconds)


class FolderLock:
    """Holds a folder of checkpoints until `release`, or the end of the process.

    Args:
        patience_seconds: time to wait for another holder to end; None: 5.

    Raises:
        CheckpointError: another process holds it.
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: Path, patience_seconds: float | None = None) -> None:
        self._lock = FileLock(folder / _NAME)
        deadline = time.monotonic() + (
            _PATIENCE_SECONDS if patience_seconds is None else patience_seconds
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not self._lock.acquire():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{folder} {explain_held(LockHolder.read(folder / _NAME))}"
                    )
                time.sleep(0.2)
        except OSError as error:
            raise StorageError(
                f"Cannot write checkpoints to {folder}: {error.strerror}."
            ) from error
        self._held = True

    def check(self) -> None:
        """Do nothing: unlike a `Lease`, this lock cannot be lost."""

    def release(self) -> None:
        """Let another process hold the folder. Later calls do nothing."""
        if self._held:
            self._held = False
            self._lock.release(remove=True)


# A lock for a folder of an object store, which has no locks: a marker that its holder keeps
# renewing.

_RENEWED_SECONDS, _DEAD_SECONDS = 10.0, 60.0
"""Interval at which a marker changes, and time without a change after which its holder counts as
dead. No clocks are compared."""


class Lease:
    """Holds a folder of checkpoints until `release`. After a process was killed, its folder is free
    at once on the same machine, elsewhere after a minute.

    In stores that can create a file only if it does not exist (S3, GCS), one of several processes
    succeeds; in others, two that start within the same second may both succeed.

    Args:
        folder: URL of the folder.
        patience_seconds: time to wait for another holder to end.

    Raises:
        CheckpointError: another run holds it.
        StorageError: the folder cannot be written.
    """

    def __init__(self, folder: RemotePath, patience_seconds: float) -> None:
        self._folder, self._path = folder, folder / _NAME
        self._own = {
            "token": uuid.uuid4().hex,
            "machine": _machine(),
            **LockHolder.this_process().facts(),
        }
        self._beats = 0
        self._ended = threading.Event()
        self._lost = False
        try:
            self._acquire(patience_seconds)
        except OSError as error:
            raise StorageError(f"Cannot write checkpoints to {folder}: {reason(error)}.") from error
        self._renewal = threading.Thread(target=self._renew, name=f"hold {folder}", daemon=True)
        self._renewal.start()

    def _acquire(self, patience_seconds: float) -> None:
        began = changed = time.monotonic()
        seen = alive = None
        while not self._take():
            marker, now = self._read(), time.monotonic()
            if marker != seen:
                alive = seen is not None and marker is not None
                seen, changed = marker, now
            if seen is not None and (now - changed > _DEAD_SECONDS or _is_gone(seen)):
                if self._read() == seen:
                    self._path.unlink(missing_ok=True)
            elif alive and now - began > patience_seconds:
                raise CheckpointError(f"{self._folder} {explain_held(LockHolder.of(seen))}")
            else:
                time.sleep(min(0.2, _RENEWED_SECONDS))

    def _take(self) -> bool:
        try:
            self._path.create(self._marker())
        except FileExistsError:
            return False
        return self._is_own()

    def _marker(self) -> bytes:
        return json.dumps(self._own | {"beat": self._beats}).encode()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path.read_bytes())
            return found if isinstance(found, dict) else {}
        except FileNotFoundError:
            return None
        except ValueError:
            return {}

    def _is_own(self) -> bool:
        return (self._read() or {}).get("token") == self._own["token"]

    def _renew(self) -> None:
        while not self._ended.wait(_RENEWED_SECONDS):
            # the store does not answer; other processes get no answer either
            with suppress(OSError):
                if not self._is_own():
                    self._lost = True
                    return
                self._beats += 1
                if not self._ended.is_set():
                    self._path.write_bytes(self._marker())

    def check(self) -> None:
        """Raise CheckpointError if another run took over the folder, because this one seemed to be
        dead."""
        if self._lost:
            raise CheckpointError(
                f"Another run took over {self._folder}, so this run no longer writes there. Give"
                " each run its own folder."
            )

    def release(self) -> None:
        """Let another run hold the folder."""
        self._ended.set()
        self._renewal.join(_DEAD_SECONDS)  # otherwise it could write the marker again
        with suppress(OSError):
            if self._is_own():
                self._path.unlink(missing_ok=True)


def _machine() -> str:
    """Identify this boot of this machine and its process id namespace; empty where that is not
    known."""
    try:
        return (
            f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
            f" {os.readlink('/proc/self/ns/pid')}"
        )
    except OSError:
        return ""


def _is_gone(marker: dict[str, Any]) -> bool:
    """Check whether the holder of a marker was a process of this machine that has ended."""
    if not marker.get("machine") or marker["machine"] != _machine():
        return False
    try:
        os.kill(int(marker["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, ValueError):
        return False
    return False


def explain_held(holder: LockHolder | None) -> str:
    """Say that a folder of checkpoints is held: the rest of a message that begins with the
    folder."""
    who = f" ({holder.describe()})" if holder is not None else ""
    what = (
        holder.what_to_do("set another folder")
        if holder is not None
        else "Wait until it ends, or set another folder."
    )
    return (
        f"belongs to another run that has not ended{who}. Two runs cannot write their checkpoints"
        f" into one folder. {what}"
    )
