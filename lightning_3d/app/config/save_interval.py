"""How often to save, so that saving and repeating lost steps together cost least. Imports no torch.

Young (1974) and Daly (2006): with a save that costs C seconds of training and one failure in M
seconds, the best interval is sqrt(2 C M).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_sizes

AUTO = "auto"

HOURS_BETWEEN_FAILURES = 50_000.0
"""Hours that one GPU runs until it ends a job. Llama 3 405B: 419 unexpected interruptions in 54
days of 16,384 GPUs, one in 50,700 GPU-hours (arXiv 2407.21783, section 3.3.4)."""

MOST_SECONDS = 3600.0
"""No more than an hour of training is lost, however rare failures are."""

MOST_SHARE = 0.05
"""Share of the time that saving may cost at most, however frequent failures are."""


def check_save_interval(option: str, value: object) -> None:
    """Refuse anything but a positive whole number, "auto" and None.

    Raises:
        ConfigError: with the option and its value.
    """
    if isinstance(value, str):
        if value != AUTO:
            raise ConfigError(f"{option} must be a number of steps, auto or null; got {value!r}.")
    else:
        check_sizes(**{option: value})  # type: ignore[arg-type]


@dataclass(frozen=True)
class SaveInterval:
    """An interval between saves, with the numbers that it follows from.

    Attributes:
        steps: optimizer steps between saves.
        step_seconds: time of a step.
        save_seconds: time for which a save holds up training.
        failure_hours: expected time between failures of the whole job.
    """

    steps: int
    step_seconds: float
    save_seconds: float
    failure_hours: float

    @property
    def words(self) -> str:
        lost = 100 * self.save_seconds / (self.steps * self.step_seconds + self.save_seconds)
        return (
            f"Checkpoints are saved every {self.steps} steps ({self.steps * self.step_seconds:.3g}"
            f" s): a step takes {self.step_seconds:.3g} s, a save holds training up for"
            f" {self.save_seconds:.3g} s ({lost:.2g} %), and one failure in"
            f" {self.failure_hours:.3g} h is expected."
        )


def best_interval(
    step_seconds: float,
    save_seconds: float,
    ranks: int,
    hours_between_failures: float = HOURS_BETWEEN_FAILURES,
) -> SaveInterval:
    """Return the best interval for a job.

    Args:
        step_seconds, save_seconds: see `SaveInterval`.
        ranks: number of ranks of the job.
        hours_between_failures: hours that one rank runs until it ends the job.
    """
    failure_seconds = 3600 * hours_between_failures / ranks
    seconds = min(sqrt(2 * save_seconds * failure_seconds), MOST_SECONDS)
    seconds = max(seconds, save_seconds / MOST_SHARE)
    return SaveInterval(
        max(1, ceil(seconds / step_seconds)), step_seconds, save_seconds, failure_seconds / 3600
    )
