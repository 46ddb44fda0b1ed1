"""One measured run and what is predicted for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.planner_accuracy.allocator import allocated, queue_of
from benchmarks.planner_accuracy.published_runs import Run
from lightning_3d.app.planner.step_time import step_of

_GIGA = 2**30
"""Measured runs print memory in GiB."""


@dataclass(frozen=True)
class Comparison:
    """A run and what is predicted for it: seconds of a step; bytes of the rank that the software
    prints; and of the fullest rank, if nothing had to be given back; and the share of a step in
    which its GPUs wait for messages, but for those of pipelines."""

    run: Run
    seconds: float
    memory: float
    roomy: float
    waiting: float = 0.0

    @property
    def time_error(self) -> float | None:
        """(predicted - measured) / measured seconds of a step; None where none are measured."""
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.run.memory is None else self.memory / _GIGA / self.run.memory - 1

    @property
    def measured_rate(self) -> float | None:
        """Tokens a second of one GPU."""
        return None if self.run.seconds is None else _rate(self.run, self.run.seconds)

    @property
    def predicted_rate(self) -> float:
        return _rate(self.run, self.seconds)


def _rate(run: Run, seconds: float) -> float:
    return run.job.global_batch * run.job.seq / seconds / run.job.layout.world_size


def compare(run: Run) -> Comparison:
    """Predict a measured run."""
    step = step_of(run.job, run.machine)
    queue = queue_of(step, run.job)
    printed = allocated(run.job, queue=queue, room=run.machine.memory)
    roomy, waiting = (
        allocated(run.job, queue=queue).total,
        (step.communication + step.data) / step.seconds,
    )
    return Comparison(run, step.seconds, printed.total, roomy, waiting)


def quantile(values: Iterable[float], share: float) -> float:
    """Return the quantile of the absolute values, interpolated linearly."""
    ordered = sorted(abs(value) for value in values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
