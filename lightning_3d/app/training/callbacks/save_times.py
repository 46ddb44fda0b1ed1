"""Measures steps and saves of a fit, and chooses the interval between saves from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_3d.app.config.save_interval import best_interval

_CHANGE = 1.2
"""A new interval is used, and reported, only if it differs by this factor from the present one."""


class SaveTimes:
    """The times of steps and saves on this rank.

    Args:
        hours_between_failures: hours that one rank is expected to run until it ends the job.
    """

    def __init__(self, hours_between_failures: float) -> None:
        self._hours = hours_between_failures
        self._began, self._first_step = 0.0, 0
        self._saving = 0.0
        self._last = 0.0

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin to measure, at the start of a fit."""
        self._began, self._first_step, self._saving = time.monotonic(), trainer.global_step, 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save: how long it holds up training, also while it waits for the end of the
        save before."""
        start = time.monotonic()
        yield
        self._last = time.monotonic() - start
        self._saving += self._last

    def choose(self, trainer: pl.Trainer, present: int) -> int:
        """Return the best interval after a save, the same on all ranks. Collective: the times of
        rank 0 count."""
        steps = trainer.global_step - self._first_step
        if steps < 1:
            return present
        step_seconds = (time.monotonic() - self._began - self._saving) / steps
        found = best_interval(step_seconds, self._last, trainer.world_size, self._hours)
        chosen = int(trainer.strategy.broadcast(found.steps))
        if max(chosen, present) < _CHANGE * min(chosen, present):
            return present
        rank_zero_info(found.words)
        return chosen
