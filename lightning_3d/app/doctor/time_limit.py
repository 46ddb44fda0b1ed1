"""Run an action with a time limit, also one that hangs in a library or in the kernel. Pure
Python."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class TimeLimit(Exception):
    """An action did not end in time. Its thread is left behind, and ends with the process."""


def within(seconds: float, action: Callable[[], Result]) -> Result:
    """Run an action in a thread of its own and return its result, or raise its exception.

    A signal would not do: Python handles signals only between two instructions, never inside of a
    call that hangs.

    Raises:
        TimeLimit: the action has not ended.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeLimit
    return results[0]
