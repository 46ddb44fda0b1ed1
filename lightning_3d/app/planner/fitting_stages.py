"""Pipeline stages that fit in memory (`parallelism.stages=auto`). Pure Python.

Stages of equal work need unequal memory: with 1F1B, rank r of p keeps the activations of p - r
micro-batches, the first stage has the embedding, and the last one has the logits. Where the fullest
rank does not fit, it gets fewer blocks, and ranks with free memory get more.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace

from lightning_3d.app.planner.block_memory import block_bytes
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.memory import indices_in_flight, memory_of
from lightning_3d.app.planner.rank_memory import RankBytes, StagesOfRank
from lightning_3d.app.planner.stages import block_work, end_work, stages_with


def fitting_job(job: Job, room: float) -> Job | None:
    """Return the job if it fits in `room` bytes of each GPU, else with other stages, so that it
    fits; None if no stages do.

    Args:
        job: a job whose stages are not given.
        room: most bytes that the fullest rank may need.
    """
    if memory_of(job).total <= room:
        return job
    blocks = fitting_stages(job, room)
    return replace(job, blocks=blocks) if blocks is not None else None


def fitting_stages(job: Job, room: float) -> tuple[int, ...] | None:
    """Return the number of blocks of each stage, such that every rank fits and the stage with the
    most work has as little as possible.

    Every stage gets one block. Then the stage that has the least work with one block more gets it,
    until its rank is full. With one stage on each rank and equal blocks no split has a faster
    slowest stage; otherwise, it is a good one. Of equal stages the last gets a block first, because
    it keeps the fewest micro-batches.

    Returns:
        None if some rank does not fit in any case.
    """
    model, ranks, sizes, of_job = (
        job.model,
        indices_in_flight(job),
        block_bytes(job),
        RankBytes(job),
    )
    owner = {index: rank for rank, own in enumerate(ranks) for index in own.stages}
    counts, rest = [1] * len(owner), model.layers - len(owner)
    if rest < 0:
        return None
    work, head = (
        sum(block_work(model)[kind][0] for kind in model.pattern) / model.layers,
        end_work(model)[1][0],
    )
    last = len(owner) - 1

    def have_room(checked: Iterable[int]) -> bool:
        stages = stages_with(job, tuple(counts))
        own = (
            StagesOfRank(tuple(stages[index] for index in ranks[rank].stages), ranks[rank].moments)
            for rank in checked
        )
        return all(of_job.memory(one, sizes).total <= room for one in own)

    def next_work(index: int) -> tuple[float, int]:
        return (counts[index] + 1) * work + head * (index == last), -index

    if not have_room(range(len(ranks))):
        return None
    growing = [next_work(index) for index in owner]
    heapq.heapify(growing)
    while rest and growing:
        index = -heapq.heappop(growing)[1]
        counts[index] += 1
        # One block more moves the blocks of all later stages, which matters where blocks are not
        # alike.
        if have_room([owner[index]] if len(model.kinds) == 1 else range(len(ranks))):
            rest -= 1
            heapq.heappush(growing, next_work(index))
        else:
            counts[index] -= 1
    return tuple(counts) if rest == 0 else None
