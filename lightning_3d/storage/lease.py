"""One run at a time writes checkpoints into a folder of an object store, which has no locks: a marker that its holder keeps renewing."""

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
"""How often a marker changes, and after what time without a change its holder is taken for dead. No clocks are compared."""


class Lease:
    """Holds a folder until `release`. A process that was killed holds it for some time more, on this machine not at all.

    Stores that write a file only if there is none (S3, GCS) let one of several have it; with others two that begin within the same
    second may both.

    Raises:
        CheckpointError: another run holds it. StorageError: nothing can be written there.
    """

    def __init__(self, folder: RemotePath, patience_seconds: float) -> None:
        self._folder, self._path = folder, folder / _NAME
        self._own = {"token": uuid.uuid4().hex, "machine": _machine(), **Holder.this_process().facts()}
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
                raise CheckpointError(
                    f"{self._folder} belongs to another run that has not ended{named(Holder.of(seen))}"
                )
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
            with suppress(OSError):  # the store does not answer: to others neither
                if not self._is_own():
                    self._lost = True
                    return
                self._beats += 1
                if not self._ended.is_set():
                    self._path.write_bytes(self._marker())

    def check(self) -> None:
        """Raises CheckpointError: another run took this one for dead."""
        if self._lost:
            raise CheckpointError(f"{self._folder} was taken over by another run, so this one does not write there any more.")

    def release(self) -> None:
        self._ended.set()
        self._renewal.join(_DEAD_SECONDS)  # or it would write the marker again
        with suppress(OSError):
            if self._is_own():
                self._path.unlink(missing_ok=True)


def _machine() -> str:
    """This boot of this machine, and the space of its process numbers; empty where that is not known."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _is_gone(marker: dict[str, Any]) -> bool:
    """Whether its holder was a process of this machine that has ended."""
    if not marker.get("machine") or marker["machine"] != _machine():
        return False
    try:
        os.kill(int(marker["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, KeyError, ValueError):
        return False
    return False


def named(holder: Holder | None) -> str:
    """The rest of a message that says that a folder of checkpoints is held."""
    shared = "Two runs cannot write their checkpoints into one folder."
    if holder is None:
        return f". {shared} Wait until it ends, or set another folder."
    return f" ({holder.describe()}). {shared} {holder.what_to_do('set another folder')}"
