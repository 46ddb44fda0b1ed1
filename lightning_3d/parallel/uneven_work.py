"""Time in work that is not shared out evenly, such as experts with more tokens than others: a rank
that has more of it is not slow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from lightning_3d.compat.waits import seconds_waited


class _Clock:
    """Seconds in uneven work so far, without the time in it that this process waited for others."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None
        self._inside = False

    def begin(self) -> None:
        if not self._inside:
            self._began = time.perf_counter() - seconds_waited()

    def end(self) -> None:
        if not self._inside and self._began is not None:
            self.seconds += time.perf_counter() - seconds_waited() - self._began
            self._began = None

    @contextmanager
    def running(self) -> Iterator[None]:
        self.begin()
        outermost, self._inside = not self._inside, True
        try:
            yield
        finally:
            self._inside = not outermost
            self.end()


_clock = _Clock()


def uneven_seconds() -> float:
    """Return the seconds that this process has spent in uneven work."""
    return _clock.seconds


def uneven_work() -> AbstractContextManager[None]:
    """Return a context for uneven work."""
    return _clock.running()


def uneven_backward(inputs: Tensor, output: Tensor) -> None:
    """Count the backward from `output` to `inputs` as uneven work. No number changes."""
    if inputs.requires_grad and output.requires_grad:
        output.register_hook(lambda gradient: _clock.begin())
        inputs.register_hook(lambda gradient: _clock.end())
