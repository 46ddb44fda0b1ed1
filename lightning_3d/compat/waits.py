"""The time that this process waits in collectives and messages of torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_waited = 0.0


def seconds_waited() -> float:
    """Return the seconds that this process has waited since `count_waits`. On a GPU it hardly ever
    waits: the GPU does."""
    return _waited


def add_wait(seconds: float) -> None:
    """Count seconds that this process has waited for a message outside of torch's collectives."""
    global _waited
    _waited += seconds


def count_waits() -> Callable[[], None]:
    """Begin to count, and return a function that ends it. All of torch's collectives wait in
    `Work.wait` (torch 2.8 to 2.13), which is replaced meanwhile."""
    from torch.distributed import Work

    original = Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _waited
        start = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            _waited += time.perf_counter() - start

    def end() -> None:
        Work.wait = original  # type: ignore[method-assign]

    Work.wait = wait  # type: ignore[method-assign]
    return end
