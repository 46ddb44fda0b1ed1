"""Locks of files: one process at a time works in a folder, and the kernel frees its lock however
the process ends. Imports no torch."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import filelock

from lightning_3d.errors import CheckpointError, StorageError
from lightning_3d.storage.holder import Holder
from lightning_3d.storage.lease import Lease, explain_held
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
        Holder.this_process().write(self.path)
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
                    raise CheckpointError(f"{folder} {explain_held(Holder.read(folder / _NAME))}")
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
