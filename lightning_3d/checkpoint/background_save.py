"""Threads for writing to storage, which may take long or never end."""

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
        value: return value of the action, once it is over.
        error: error that the action raised, once it is over; None if it raised none.
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
        """Wait for the action until `seconds` after its start, and return whether it has ended."""
        self._thread.join(max(0.0, self._began + seconds - time.monotonic()))
        return not self._thread.is_alive()


class BackgroundSave(Task):
    """The last part of a save: writing in the background.

    Args:
        ended: function to call when it is over, whether it succeeded or not.

    Attributes:
        path: path of the checkpoint.
    """

    def __init__(
        self,
        path: Place,
        tensors: TensorSave,
        finish: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
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
            StorageHangs: it takes longer; the message says what this rank is doing.
        """
        if not self.ends_within(seconds):
            raise StorageHangs(
                f"checkpoint {self.path} has not finished {seconds:g} s after it started:"
                f" {self._tensors.doing}"
            )

    def require_peers(self) -> None:
        """Raise if another rank is gone. Call when the save is over, before the next collective.

        Raises:
            Exception: only this rank may have noticed; ranks that still wait for this one end when
                it ends.
        """
        if self.error is not None and not isinstance(self.error, CheckpointError):
            raise self.error


def _give_way() -> None:
    """Lower the priority of this thread (Linux has one per thread): hashing takes a core for a
    second per gigabyte."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)


def in_time(action: Callable[[], T], seconds: float, what: str) -> T:
    """Run an action on files; return its value or raise its error.

    Raises:
        StorageHangs: it takes longer than `seconds`.
    """
    task = Task(action, what)
    if not task.ends_within(seconds):
        raise StorageHangs(f"{what} has not finished after {seconds:g} s.")
    if task.error is not None:
        raise task.error
    return task.value
