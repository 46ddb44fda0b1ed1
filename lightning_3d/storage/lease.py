"""A lock for a folder of an object store, which has no locks: a marker that its holder keeps
renewing."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_3d.errors import CheckpointError, StorageError, reason
from lightning_3d.storage.holder import Holder
from lightning_3d.storage.remote_path import RemotePath

_NAME = ".lightning_3d.lock"
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
            **Holder.this_process().facts(),
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
                raise CheckpointError(f"{self._folder} {explain_held(Holder.of(seen))}")
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


def explain_held(holder: Holder | None) -> str:
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
