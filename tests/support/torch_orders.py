"""The orders of actions that the schedule classes of torch.distributed.pipelining compute."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_pipeline_order(
    schedule: str, stages: Sequence[int], num_stages: int, pp: int, micro_batches: int
) -> tuple[tuple[tuple[int, str, int], ...], ...]:
    """Actions (stage, letter in F B I W, micro-batch) of every rank, as torch 2.11 to 2.13 computes
    them.

    The classes want live stages and a process group, but read only these attributes to compute
    their order, which is not public. Combined actions (DualPipeV) are flattened.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    fake_stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            group_size=pp,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            has_backward=True,
            submod=None,
            stage_index_to_group_rank={},
        )
        for stage in stages
    ]
    schedule_class: Any = get_schedule_class(schedule)
    order = schedule_class(
        fake_stages, micro_batches, loss_fn=lambda output, target: output
    ).pipeline_order
    return tuple(_single(order[rank]) for rank in range(pp))


def _single(actions: Sequence[Any]) -> tuple[tuple[int, str, int], ...]:
    parts = [
        part for action in actions if action is not None for part in action.sub_actions or (action,)
    ]
    return tuple(
        (part.stage_index, LETTERS[part.computation_type.name], part.microbatch_index)
        for part in parts
        if part.computation_type.name in LETTERS
    )
