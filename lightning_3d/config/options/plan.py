"""Options of the planner's proposals. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.layout.sizes import check_number

MEMORY_RESERVE = 0.12
"""Share of a GPU's memory that proposals leave free. Predictions are more often too low than too high: where 90 to 97 % of a GPU was
predicted, most of the measured runs ran out of memory."""


@dataclass(frozen=True)
class PlanOptions:
    """Keys `plan`.

    Attributes:
        memory_reserve: share of each GPU's memory that no proposal may use, 0 to 0.9.
    """

    memory_reserve: float = MEMORY_RESERVE

    def check(self) -> None:
        """Raise ConfigError for a share outside 0 to 0.9."""
        check_number("plan.memory_reserve", self.memory_reserve, most=0.9)
