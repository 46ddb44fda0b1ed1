"""Callback that shows progress: one line on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from typing_extensions import override

from lightning_3d.app.training.step_clock import StepClock, StepNumbers, last_val_loss


class ProgressBar(LightningProgressBar):
    """One line with step, loss, tokens/s, step time and time left.

    On a terminal the line is rewritten in place; elsewhere a new one is printed every `every`
    steps. Step time and tokens/s are means over the last `window` steps.

    Args:
        every: steps between lines when the output is not a terminal.
        window: steps that speeds are averaged over.
        stream: text stream to write to; None is `sys.stdout` at the time of writing.
    """

    def __init__(self, every: int = 10, *, window: int = 20, stream: TextIO | None = None) -> None:
        super().__init__()
        self._every = max(1, every)
        self._recent: deque[StepNumbers] = deque(maxlen=max(1, window))
        self._clock = StepClock()
        self._stream = stream
        self._enabled = True
        self._width = 0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        self._end_line()
        print(*args, file=self._out, flush=True)

    @property
    def _out(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stdout

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = StepClock()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._clock.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        numbers = self._clock.stop(trainer, outputs, batch)
        if numbers is None:
            return
        self._recent.append(numbers)
        total = _total_steps(trainer)
        step = trainer.global_step
        if self._out.isatty():
            line = progress_line(self._recent, total)
            self._out.write("\r" + line.ljust(self._width))
            self._out.flush()
            self._width = len(line)
        elif step % self._every == 0 or step in (1, total):
            print(progress_line(self._recent, total), file=self._out, flush=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = last_val_loss(trainer)
        if self._enabled and not trainer.sanity_checking and value is not None:
            self.print(f"step {trainer.global_step}: validation loss {value:.4f}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled:
            self._end_line()

    def _end_line(self) -> None:
        """Move on from the line that is being rewritten."""
        if self._width:
            self._out.write("\n")
            self._width = 0


def progress_line(recent: Iterable[StepNumbers], total: int | None) -> str:
    """Format the latest of some consecutive steps as one line; speeds are means over them.

    Args:
        total: steps of the run; None if it has no end.
    """
    steps = list(recent)
    latest = steps[-1]
    seconds = sum(step.seconds for step in steps)
    mean = seconds / len(steps)
    speed = sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0
    place = (
        f"step {latest.step}" if total is None else f"step {latest.step:{len(str(total))}d}/{total}"
    )
    line = f"{place} | loss {latest.loss:.4f} | {speed:,.0f} tokens/s | {mean:.3f} s/step"
    if latest.routers is not None:
        line += f" | fullest expert {max(latest.routers.max_over_mean):.2f} x mean"
    if total is not None:
        line += f" | {format_seconds(max(0, total - latest.step) * mean)} left"
    return line


def _total_steps(trainer: Trainer) -> int | None:
    if trainer.max_steps > 0:
        return trainer.max_steps
    estimate = trainer.estimated_stepping_batches
    return None if estimate == float("inf") else int(estimate)


def format_seconds(seconds: float) -> str:
    """Format a duration as `0:42`, `12:05` or `3:07:30`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
