"""What this rank does at the moment, for a watch in another thread. Imports no torch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

STARTING, STEP, EVALUATING, SAVING, BETWEEN = (
    "starting",
    "training step",
    "evaluation",
    "saving a checkpoint",
    "between two steps",
)
"""Phases of a run."""

KEPT_STEPS = 50
TIMED_STEPS = 3
"""Steps after which the time of a step is known."""


class Heartbeat:
    """The phase of a run, the action in it, and when that last changed. One thread writes, others
    read.

    Attributes:
        phase: one of the phases above.
        step: number of the current or the last training step, 1 for the first.
        action: (kind, stage, micro-batch) in the schedule, the latter two None where they do not
            apply.
        waits_for: (global rank, message) that this rank waits for, if it waits for a message of the
            pipeline.
        since: `time.monotonic()` of the last change.
        beats: number of changes.
    """

    def __init__(self) -> None:
        self.phase, self.step = STARTING, 0
        self.action: tuple[str, int | None, int | None] | None = None
        self.waits_for: tuple[int, str] | None = None
        self.since = time.monotonic()
        self.beats = 0
        self._began = self.since
        self._seconds: deque[float] = deque(maxlen=KEPT_STEPS)

    def act(self, kind: str, stage: int | None = None, micro_batch: int | None = None) -> None:
        """Begin an action."""
        self.action = kind, stage, micro_batch
        self.beat()

    def beat(self) -> None:
        """Note progress."""
        self.since = time.monotonic()
        self.beats += 1

    @contextmanager
    def waiting(self, rank: int, message: str) -> Iterator[None]:
        """Wait for a message of another rank inside."""
        self.waits_for = rank, message
        yield  # stays set if the wait ends in an error
        self.waits_for = None
        self.beat()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase."""
        self.phase, self.action, self.waits_for = phase, None, None
        if step is not None and step != self.step:
            self.step, self._began = step, time.monotonic()
        self.beat()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in a phase inside, and afterwards in the present one again."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def end_step(self) -> None:
        """End a training step: its time counts for the median."""
        self._seconds.append(time.monotonic() - self._began)
        self.enter(BETWEEN)

    def step_seconds(self) -> float | None:
        """Return the median time of the last steps; None before some are known."""
        return median(self._seconds) if len(self._seconds) >= TIMED_STEPS else None

    def describe(self) -> str:
        """Return phase and action in words, such as `training step 7: forward, stage 2, micro-batch
        5`."""
        where = f"{self.phase} {self.step}" if self.phase == STEP else self.phase
        if self.action is None:
            return where
        kind, stage, micro_batch = self.action
        words = [kind]
        words += [f"stage {stage}"] if stage is not None else []
        words += [f"micro-batch {micro_batch}"] if micro_batch is not None else []
        return f"{where}: {', '.join(words)}"
