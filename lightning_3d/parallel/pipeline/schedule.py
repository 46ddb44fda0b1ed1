"""The order of actions of every pipeline rank, as the engine runs them:
`lightning_3d.layout.pipeline_orders` with typed actions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from lightning_3d.layout import pipeline_orders


class Kind(Enum):
    """The computation of an action. The letters are those of the zero-bubble paper
    (arXiv:2401.10241) and of torch."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True)
class Action:
    """One unit of work of a rank: what, on which stage, for which micro-batch."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Order = tuple[tuple[Action, ...], ...]


@lru_cache(maxsize=64)
def training_order(schedule: str, pp: int, vp: int, micro_batches: int) -> Order:
    """Actions of every pipeline rank for one optimizer step, with types; arguments as in
    `pipeline_orders.training_order`."""
    return _typed(pipeline_orders.training_order(schedule, pp, vp, micro_batches))


@lru_cache(maxsize=64)
def forward_order(schedule: str, pp: int, vp: int, micro_batches: int) -> Order:
    """Actions of every pipeline rank for a pass without backward."""
    return _typed(pipeline_orders.forward_order(schedule, pp, vp, micro_batches))


def _typed(order: pipeline_orders.Order) -> Order:
    return tuple(
        tuple(Action(Kind(letter), stage, micro_batch) for stage, letter, micro_batch in actions)
        for actions in order
    )
