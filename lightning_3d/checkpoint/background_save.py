"""What may take long, or never end, in a thread of its own: writing to a disk."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from lightning_3d.checkpoint.writing import TensorSave
from lightning_3d.errors import CheckpointError, StorageHangs
from lightning_3d.storage.remote_path import Place

T = TypeVar("T")


class Task:
    """Runs an action in a thread that does not keep the process alive.

    Attributes:
        value, error: what it returned or raised, when it is over.
    """

    def __init__(self, action: Callable[[], Any], name: str) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(action,), name=name, daemon=True)
        self._thread.start()

    def _run(self, action: Callable[[], Any]) -> None:
        try:
            self.value = action()
        except BaseException as error:
            self.error = error

    def ends_within(self, seconds: float) -> bool:
        """Wait until it is over, at most so long after it began. Whether it is over."""
        self._thread.join(max(0.0, self._began + seconds - time.monotonic()))
        return not self._thread.is_alive()


class BackgroundSave(Task):
    """The last part of a save.

    Args:
        ended: to be called when it is over, whatever came of it.

    Attributes:
        path: of the checkpoint.
    """

    def __init__(self, path: Place, tensors: TensorSave, finish: Callable[[], None], ended: Callable[[], None]) -> None:
        self.path = path
        self._tensors = tensors

        def run() -> None:
            _give_way()
            try:
                finish()
            finally:
                ended()

        super().__init__(run, f"save {path.name}")

    def join(self, seconds: float) -> None:
        """Wait until it is over.

        Raises:
            StorageHangs: that takes longer; says what this rank is doing.
        """
        if not self.ends_within(seconds):
            raise StorageHangs(f"the checkpoint {self.path} is not written {seconds:g} s after its begin: {self._tensors.doing}")

    def require_peers(self) -> None:
        """To be called when it is over, before something that all ranks do.

        Raises:
            Exception: what this rank alone knows, that another one is gone; those that still wait for this one end when it does.
        """
        if self.error is not None and not isinstance(self.error, CheckpointError):
            raise self.error


def _give_way() -> None:
    """Where no core is free, training goes first: hashing takes a core for a second for each gigabyte. Linux counts this by thread."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)


def in_time(action: Callable[[], T], seconds: float, what: str) -> T:
    """The value of an action on files, or its error.

    Raises:
        StorageHangs: it takes longer.
    """
    task = Task(action, what)
    if not task.ends_within(seconds):
        raise StorageHangs(f"{what} has not come to its end after {seconds:g} s.")
    if task.error is not None:
        raise task.error
    return task.value
