"""Options of what watches over a run between checkpoints. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.sizes import check_number, check_sizes

AUTO = "auto"
IGNORE, REPORT, SKIP, RERUN = "ignore", "report", "skip", "rerun"
SPIKES = (IGNORE, REPORT, SKIP, RERUN)
STOP = "stop"
NONFINITE = (STOP, SKIP, IGNORE)
"""What to do when the loss or the gradient norm of a step is not finite."""


@dataclass(frozen=True)
class Reliability:
    """What watches over a run, and when it acts. The group `trainer` has the same keys.

    Attributes:
        hang_timeout: seconds without progress after which the ranks write what they do and end.
            "auto" takes ten times the median step, at least 60, and more for the first step, saves
            and evaluation; None never ends a run.
        rendezvous_timeout: seconds to wait for all ranks at the start.
        held_memory_timeout: seconds to wait at the start for GPU memory that other processes hold;
            0 does not wait.
        nonfinite_in_a_row: number of steps skipped in a row, because they are not finite, that ends
            a run.
        loss_spikes: what to do when the loss jumps: "ignore", "report" it, "skip" the optimizer
            step, or "rerun" the step first, to tell wrong arithmetic from wrong data.
        loss_spike_score: robust z-score of a loss that counts as a jump.
        check_replicas_every_n_steps: steps between comparisons of what several ranks keep alike;
            None never compares.
        rerun_every_n_steps: steps between those whose forward and backward run twice, to find wrong
            arithmetic; None never runs twice.
        slow_rank_factor: how many times as long as its peers a rank must compute to be reported;
            None never reports.
        slow_rank_steps: number of steps that it must be slow for.
    """

    hang_timeout: int | float | str | None = AUTO
    rendezvous_timeout: float = 600.0
    held_memory_timeout: float = 30.0
    nonfinite_in_a_row: int = 100
    loss_spikes: str = "report"
    loss_spike_score: float = 10.0
    check_replicas_every_n_steps: int | None = 100
    rerun_every_n_steps: int | None = None
    slow_rank_factor: float | None = 1.25
    slow_rank_steps: int = 50

    @classmethod
    def of(cls, given: Reliability | Mapping[str, Any] | None) -> Reliability:
        """Make options from a mapping; None gives the defaults.

        Raises:
            ConfigError: an unknown name, or a value out of range.
        """
        if given is None or isinstance(given, Reliability):
            options = given or cls()
        else:
            names = [field.name for field in fields(cls)]
            for name in given:
                if name not in names:
                    raise ConfigError(
                        f"reliability has no option {name!r}.{did_you_mean(name, names)} It has"
                        f" {listed(names)}."
                    )
            options = cls(**given)
        options.check()
        return options

    def check(self, group: str = "") -> None:
        """Refuse values out of range.

        Args:
            group: words before the name of an option in messages, such as "trainer.".

        Raises:
            ConfigError: with the option and its value.
        """
        if isinstance(self.hang_timeout, str):
            if self.hang_timeout != AUTO:
                raise ConfigError(
                    f"{group}hang_timeout must be a number of seconds, auto or null; got"
                    f" {self.hang_timeout!r}."
                )
        elif self.hang_timeout is not None:
            check_number(f"{group}hang_timeout", self.hang_timeout, least=1)
        check_number(f"{group}rendezvous_timeout", self.rendezvous_timeout, least=1)
        check_number(f"{group}held_memory_timeout", self.held_memory_timeout, least=0)
        check_number(f"{group}loss_spike_score", self.loss_spike_score, least=1)
        if self.loss_spikes not in SPIKES:
            hint = did_you_mean(str(self.loss_spikes), SPIKES)
            raise ConfigError(
                f"{group}loss_spikes must be {listed(SPIKES, last='or')}; got"
                f" {self.loss_spikes!r}.{hint}"
            )
        if self.slow_rank_factor is not None:
            check_number(f"{group}slow_rank_factor", self.slow_rank_factor, least=1.01)
        counts = (
            "nonfinite_in_a_row",
            "check_replicas_every_n_steps",
            "rerun_every_n_steps",
            "slow_rank_steps",
        )
        check_sizes(**{f"{group}{name}": getattr(self, name) for name in counts})
