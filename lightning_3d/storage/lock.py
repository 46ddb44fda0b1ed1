"""One run at a time writes checkpoints into a folder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

from lightning_3d.errors import CheckpointError, StorageError
from lightning_3d.storage.holder import Holder
from lightning_3d.storage.lease import Lease, named
from lightning_3d.storage.remote_path import Place, RemotePath

_NAME = ".lightning_3d.lock"
_PATIENCE_SECONDS = 5.0
"""An earlier try of the same run may still be ending."""


def hold(folder: Place, patience_seconds: float | None = None) -> FolderLock | Lease:
    """Raises as both do."""
    if isinstance(folder, RemotePath):
        return Lease(folder, _PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
    return FolderLock(folder, patience_seconds)


class FolderLock:
    """Holds a folder until `release`, or the end of the process, however that comes. File systems without locks cannot help.

    Raises:
        CheckpointError: another process holds it. StorageError: nothing can be written there.
    """

    def __init__(self, folder: Path, patience_seconds: float | None = None) -> None:
        self._path = folder / _NAME
        self._descriptor = -1
        deadline = time.monotonic() + (_PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not self._take():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"{folder} belongs to another run that has not ended{named(Holder.read(self._path))}"
                    )
                time.sleep(0.2)
        except OSError as error:
            raise StorageError(f"Cannot write checkpoints to {folder}: {error.strerror}.") from error

    def _take(self) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:  # no locks here
            pass
        if not self._path.exists() or os.fstat(descriptor).st_ino != self._path.stat().st_ino:
            os.close(descriptor)  # who held it has just released it, and the file with it
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(Holder.this_process().facts()).encode())
        self._descriptor = descriptor
        return True

    def check(self) -> None:
        """It cannot be lost."""

    def release(self) -> None:
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1
