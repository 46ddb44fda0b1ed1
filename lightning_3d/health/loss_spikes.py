"""Finds losses that jump out of the losses before them. Imports no torch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from statistics import median

WINDOW = 64
"""Losses that a loss is compared with."""

LEAST = 20
"""Losses that must be known before one is judged."""

_TO_DEVIATION = 1.4826
"""The median of the distances from the median, times this, is the standard deviation of normally
distributed numbers."""

_LEAST_SPREAD = 1e-3
"""Spread, as a share of the median, below which losses count as equal: a run on constant data must
not report its rounding."""


@dataclass(frozen=True)
class Spike:
    """A loss that jumps.

    Attributes:
        loss: the loss.
        usual: median of the losses before it.
        score: how many standard deviations it lies above, robustly estimated.
    """

    loss: float
    usual: float
    score: float

    @property
    def words(self) -> str:
        return (
            f"the loss jumps to {self.loss:.4g}, from {self.usual:.4g} before (robust z-score"
            f" {self.score:.0f})"
        )


class LossSpikes:
    """The losses of the last steps, and those that jump.

    The median and the median distance from it hardly change when a few losses are wrong. A falling
    loss raises no alarm: only losses above the median count. Losses of spikes are not kept, so that
    a second one is found too, but after `LEAST` spikes in a row the window begins anew: the loss
    has changed for good.

    Args:
        score: robust z-score of a loss that counts as a jump.
    """

    def __init__(self, score: float) -> None:
        self._score = score
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    def judge(self, loss: float) -> Spike | None:
        """Return the spike that the loss of a step is, or None."""
        if not isfinite(loss):  # judged elsewhere
            return None
        spike = self._compare(loss)
        if spike is None:
            self._losses.append(loss)
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        if self._in_a_row >= LEAST:
            self._losses.clear()
            self._in_a_row = 0
        return spike

    def _compare(self, loss: float) -> Spike | None:
        if len(self._losses) < LEAST:
            return None
        usual = median(self._losses)
        spread = _TO_DEVIATION * median(abs(one - usual) for one in self._losses)
        score = (loss - usual) / max(spread, _LEAST_SPREAD * abs(usual), 1e-12)
        return Spike(loss, usual, score) if score >= self._score else None
