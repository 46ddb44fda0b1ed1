"""The order of actions of every pipeline rank.

The interleaved and V-shaped orders are the ones that the schedules of `torch.distributed.pipelining` compute. GPipe and 1F1B are
written here: their torch classes run a loop instead of a list, and the list that torch 2.13 offers for display is off by one
micro-batch for 1F1B.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from lightning_3d.compat.torch import torch_pipeline_order
from lightning_3d.layout.schedules import ScheduleInfo, find_schedule, stages_of_rank


class Kind(Enum):
    """What an action computes. The letters are the ones of the zero-bubble paper (arXiv 2401.10241) and of torch."""

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
    """Actions of every pipeline rank, in its order, for one optimizer step.

    Args:
        schedule: name as in `lightning_3d.layout.schedules`.
        pp: pipeline ranks. vp: stages per rank. micro_batches: number of micro-batches of the step.
    """
    info = find_schedule(schedule)
    if pp == 1 and vp == 1:
        return (_alternating(0, micro_batches, warm_up=0),)
    if info.name == "GPipe":
        return tuple(_alternating(rank, micro_batches, warm_up=micro_batches) for rank in range(pp))
    if info.name == "1F1B":
        return tuple(_alternating(rank, micro_batches, warm_up=pp - 1 - rank) for rank in range(pp))
    return _torch_order(info, pp, vp, micro_batches)


@lru_cache(maxsize=64)
def forward_order(schedule: str, pp: int, vp: int, micro_batches: int) -> Order:
    """Actions of a pass without backward: each rank runs all micro-batches of its first stage, then of its next."""
    v_shaped = find_schedule(schedule).v_shaped and pp > 1
    return tuple(
        tuple(
            Action(Kind.FORWARD, stage, micro_batch)
            for stage in sorted(stages_of_rank(rank, pp, vp, v_shaped))
            for micro_batch in range(micro_batches)
        )
        for rank in range(pp)
    )


def _alternating(stage: int, micro_batches: int, warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn, then the remaining backwards (arXiv 1806.03377)."""
    warm_up = min(warm_up, micro_batches)
    actions = [Action(Kind.FORWARD, stage, i) for i in range(warm_up)]
    for i in range(micro_batches):
        if warm_up + i < micro_batches:
            actions.append(Action(Kind.FORWARD, stage, warm_up + i))
        actions.append(Action(Kind.BACKWARD, stage, i))
    return tuple(actions)


def _torch_order(info: ScheduleInfo, pp: int, vp: int, micro_batches: int) -> Order:
    stages = stages_of_rank(0, pp, vp, info.v_shaped)
    order = torch_pipeline_order(info.name, stages, pp * vp, pp, micro_batches)
    kinds = {kind.value: kind for kind in Kind}
    return tuple(
        tuple(Action(kinds[letter], stage, micro_batch) for stage, letter, micro_batch in order[rank]) for rank in range(pp)
    )
