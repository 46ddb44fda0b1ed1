"""Calls that may never return, such as those of a store whose server is stopped. Imports no
torch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class PatientCalls:
    """Makes calls one after another in one thread, so that the caller need not wait for one that
    hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def within(self, seconds: float, call: Callable[[], _Result]) -> _Result:
        """Return what a function returns. A function that hangs keeps the thread, and later ones
        are not called before it has returned.

        Raises:
            TimeoutError: it has not returned in time, or an earlier one has not returned yet.
        """
        if self._last is not None and not self._last.done():
            self._last.exception(seconds)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="lightning_3d-store", daemon=True
            )
            self._thread.start()
        done: Future[_Result] = Future()
        self._last = done
        self._calls.put((call, done))
        return done.result(seconds)

    def close(self) -> None:
        """Let the thread end after the call that it makes now."""
        self._calls.put(None)

    def _run(self) -> None:
        while (one := self._calls.get()) is not None:
            call, done = one
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)
