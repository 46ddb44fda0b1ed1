"""A global batch that grows at the start of a run: the size of each batch is a function of the rows
read before it. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import ConfigError, listed
from lightning_3d.layout.layout import divisors
from lightning_3d.layout.sizes import check_sizes, is_finite

_KEYS = ("from", "step", "tokens")
_EXAMPLE = "for example data.batch_ramp={from: 32, step: 32, tokens: 1e9}"


@dataclass(frozen=True)
class BatchRamp:
    """Sizes of the global batches of a run.

    The n = (full - first) / step sizes below the full one share the rows of the ramp equally. The
    batch that begins at row k of the run, counted from 0, has first + floor(k n / rows) * step
    rows, and the full size from row `rows` on. This is the ramp of Megatron's
    `--rampup-batch-size`.

    Attributes:
        full: rows of a global batch after the ramp.
        first: rows of the first global batch.
        step: rows by which the batch grows each time.
        rows: rows of the ramp; 0 for a run without one.
        tokens: tokens of the ramp, as they were given.
    """

    full: int
    first: int
    step: int = 1
    rows: int = 0
    tokens: float = 0

    @classmethod
    def none(cls, full: int) -> BatchRamp:
        """Return the sizes of a run whose batches are all equal."""
        return cls(full, full)

    @classmethod
    def read(cls, given: Any, full: int, sequence_length: int) -> BatchRamp:
        """Read `data.batch_ramp`.

        Args:
            given: a mapping with `from` and `step` in rows, and `tokens`, the length of the ramp;
                None for no ramp.
            full: rows of a global batch after the ramp.
            sequence_length: tokens of a row.

        Raises:
            ConfigError: a key is missing or unknown, a value is no such number, or the steps do not
                lead to the full batch.
        """
        if given is None:
            return cls.none(full)
        check_sizes(**{"data.global_batch_size": full})
        if not isinstance(given, Mapping) or set(given) != set(_KEYS):
            raise ConfigError(
                f"data.batch_ramp must have the keys {listed(_KEYS)}, {_EXAMPLE}; got"
                f" {_written(given)}."
            )
        first, step, tokens = (given[key] for key in _KEYS)
        for key in ("from", "step"):
            if given[key] is None:
                raise ConfigError(f"data.batch_ramp.{key} must be a whole number; got null.")
        check_sizes(**{"data.batch_ramp.from": first, "data.batch_ramp.step": step})
        if (
            isinstance(tokens, bool)
            or not isinstance(tokens, int | float)
            or not is_finite(tokens)
            or tokens <= 0
        ):
            raise ConfigError(f"data.batch_ramp.tokens must be a number above 0; got {tokens!r}.")
        _require_steps_that_reach(first, step, full)
        return cls(full, first, step, math.ceil(tokens / sequence_length), tokens)

    @property
    def sizes(self) -> range:
        """All sizes, in ascending order."""
        return range(self.first, self.full + 1, self.step)

    def at(self, row: int) -> int:
        """Return the size of the batch that begins at a row of the run."""
        if row >= self.rows:
            return self.full
        return self.first + row * self._levels // self.rows * self.step

    def after(self, batches: int, start: int = 0) -> int:
        """Return the row of the run at which a number of batches end, the first of which begins at
        `start`."""
        for first, size, count in self._runs(start):
            if count is None or batches <= count:
                return first + batches * size
            batches -= count
        raise AssertionError("the last run of batches has no end")

    def count(self, start: int, end: int) -> int:
        """Return the number of complete batches from row `start` to row `end` of the run."""
        found = 0
        for first, size, count in self._runs(start):
            fitting = max(0, end - first) // size
            if count is None or fitting < count:
                return found + fitting
            found += count
        raise AssertionError("the last run of batches has no end")

    def batches(self, start: int, end: int) -> Iterator[range]:
        """Yield the rows of each batch from row `start` to row `end` of the run. The last one may
        be shorter."""
        while start < end:
            stop = min(start + self.at(start), end)
            yield range(start, stop)
            start = stop

    def described(self, unit: int = 1) -> str:
        """Describe the size of a batch in units of 1 / `unit` rows."""
        return f"{self.first * unit} to {self.full * unit}" if self.rows else str(self.full * unit)

    def __str__(self) -> str:
        return (
            f"from {self.first} by {self.step} to {self.full} over {self.tokens:g} tokens"
            if self.rows
            else "none"
        )

    @property
    def _levels(self) -> int:
        return (self.full - self.first) // self.step

    def _runs(self, row: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (first row, size, number) of successive batches of one size; the number of the last
        ones is None."""
        while row < self.rows:
            level = row * self._levels // self.rows
            size = self.first + level * self.step
            next_level = -(-(level + 1) * self.rows // self._levels)
            count = -(-(next_level - row) // size)
            yield row, size, count
            row += count * size
        yield row, self.full, None


def _require_steps_that_reach(first: int, step: int, full: int) -> None:
    """Refuse steps that do not lead from the first batch to the full one, with the nearest that
    do."""
    if first >= full:
        raise ConfigError(
            f"data.batch_ramp.from must be less than data.global_batch_size={full}; got {first}."
            f" Use at most {full - 1}."
        )
    if (full - first) % step:
        near = sorted(divisors(full - first), key=lambda size: abs(size - step))[:2]
        raise ConfigError(
            f"data.batch_ramp goes from {first} to data.global_batch_size={full} in steps of"
            f" {step}, which does not divide {full - first}. Use"
            f" data.batch_ramp.step={listed(sorted(near), last='or')}."
        )


def _written(given: Any) -> str:
    """Show a value as it is written in a configuration."""
    if not isinstance(given, Mapping):
        return repr(given)
    return "{" + ", ".join(f"{key}: {value}" for key, value in given.items()) + "}"
