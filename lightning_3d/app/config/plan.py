"""Options of the planner's proposals. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.layout.sizes import check_number

MEMORY_RISK = 0.1
"""Largest probability with which a proposed layout may run out of memory."""


@dataclass(frozen=True)
class PlanOptions:
    """Keys `plan`.

    Attributes:
        memory_risk: largest probability, 0.001 to 0.5, with which a proposed layout may run out of
            memory; at 0.5 the prediction may fill the whole GPU.
        max_bubble: largest share of their time, 0 to 1, that the ranks of a proposed pipeline may
            wait for each other, on average.
    """

    memory_risk: float = MEMORY_RISK
    max_bubble: float = 1.0

    def check(self) -> None:
        """Raise ConfigError for a probability outside 0.001 to 0.5, or a share outside 0 to 1."""
        check_number("plan.max_bubble", self.max_bubble, most=1.0)
        check_number("plan.memory_risk", self.memory_risk, least=0.001, most=0.5)
