"""Bytes of one GPU at the peak of a step: those of the rank that needs most. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from math import inf
from typing import NamedTuple

from lightning_3d.app.planner.block_memory import block_bytes
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.moments import Moment, RankMoments, moments_of
from lightning_3d.app.planner.rank_memory import Rank, RankBytes, RankMemory, StagesOfRank
from lightning_3d.app.planner.stages import (
    Stage,
    one_block,
    parameters_of,
    shard_ranks,
    split_stages,
    stages_of,
)
from lightning_3d.layout.pipeline_orders import first_forwards
from lightning_3d.layout.schedules import find_schedule, stages_of_rank


def memory_of(job: Job) -> RankMemory:
    """Return the memory of the rank that needs most."""
    memory = memory_within(job, inf)
    assert memory is not None
    return memory


def memory_within(job: Job, room: float) -> RankMemory | None:
    """Return the memory of the rank that needs most; None, as soon as it is known, if a rank needs
    more than `room` bytes."""
    ranks, blocks, most = RankBytes(job), block_bytes(job), None
    for own in _fullest(stages_of(job), job.schedule, job.layout.pp, job.layout.vp, _enough(job)):
        memory = ranks.memory(own, blocks)
        if memory.total > room:
            return None
        if most is None or memory.total > most.total:
            most = memory
    return most


@lru_cache(maxsize=1024)
def _fullest(
    stages: tuple[Stage, ...], schedule: str, pp: int, vp: int, micro_batches: int
) -> tuple[StagesOfRank, ...]:
    """Return what `stages_in_flight` does, without ranks that have the same stages as another one
    and at no moment more that is alive."""
    found: dict[tuple[Stage, ...], list[StagesOfRank]] = {}
    for own in _with_moments(stages, moments_of(schedule, pp, vp, micro_batches)):
        others = found.setdefault(own.stages, [])
        if not any(_covers(other, own) for other in others):
            others[:] = [*(other for other in others if not _covers(own, other)), own]
    return tuple(own for others in found.values() for own in others)


def _covers(more: StagesOfRank, less: StagesOfRank) -> bool:
    return all(any(moment.covers(other) for moment in more.moments) for other in less.moments)


def memory_of_all(job: Job) -> RankMemory:
    """Return the memory of all ranks together, each at its peak, for a host that runs them all."""
    pipelines, blocks, of_job = (
        job.layout.world_size // job.layout.pp,
        block_bytes(job),
        RankBytes(job),
    )
    ranks = [asdict(of_job.memory(own, blocks)) for own in stages_in_flight(job)]
    return RankMemory(**{name: pipelines * sum(rank[name] for rank in ranks) for name in ranks[0]})


def stages_in_flight(job: Job) -> list[StagesOfRank]:
    """Return for each rank of a pipeline its stages and its moments."""
    return _with_moments(stages_of(job), indices_in_flight(job))


def _with_moments(stages: Sequence[Stage], ranks: Sequence[RankMoments]) -> list[StagesOfRank]:
    return [StagesOfRank(tuple(stages[index] for index in own), moments) for own, moments in ranks]


def indices_in_flight(job: Job) -> tuple[RankMoments, ...]:
    """Return for each rank of a pipeline the indices of its stages and its moments."""
    return moments_of(job.schedule, job.layout.pp, job.layout.vp, _enough(job))


def least_memory(
    job: Job, levels: Sequence[str], *, balanced: bool = True, room: float = -inf
) -> Iterator[tuple[str, float]]:
    """Yield for each level of recomputation a lower bound of the fullest rank's bytes for all
    schedules and ZeRO stages: all of its blocks, and the fewest micro-batches in flight.

    Args:
        balanced: see `least_in_flight`.
        room: bytes that are enough: if one ZeRO stage needs no more, its bound is yielded, which
            need not be the lowest.
    """
    share = _smallest_share(job)
    # of a pipeline, the micro-batches in flight may be all
    has_gradients = job.layout.pp == 1 and job.micro_batches > 1
    moment = Moment(0, (least_in_flight(job, balanced),), (0,), (has_gradients,))
    spare, lean = _spare_bytes(job, share), _leanest(job)[::-1]
    ranks: list[Rank] = []
    for level in levels:
        if job.autocast:  # a recomputed block has no copies of its weights
            ranks.clear()
        kinds = block_bytes(job.but(recompute=level))
        least = ((min(kept for kept, _ in kinds), min(temporary for _, temporary in kinds)),) * len(
            kinds
        )
        lowest = inf
        # the last ZeRO stage first: in most jobs it needs the least
        for place, each in enumerate(lean):
            if place == len(ranks):
                ranks.append(RankBytes(each.but(recompute=level), at_end=True).rank((share,)))
            lowest = min(lowest, ranks[place].memory((moment,), least).total - spare)
            if lowest <= room:
                break
        yield level, lowest


class LeastBytes(NamedTuple):
    """Lower bounds of what the fullest rank needs with some degrees of parallelism, for all
    schedules, ZeRO stages, micro-batches and levels of recomputation.

    Attributes:
        held: bytes when the optimizer steps, without activations.
        passing: bytes in every backward pass, without activations.
        blocks: its blocks.
    """

    held: float
    passing: float
    blocks: int


def least_bytes(job: Job) -> LeastBytes:
    """Return lower bounds for the degrees of parallelism of a job."""
    share = _smallest_share(job)
    ranks, spare = (
        [RankBytes(each).rank((share,)) for each in _leanest(job)],
        _spare_bytes(job, share),
    )
    return LeastBytes(
        min(rank.held for rank in ranks) - spare,
        min(rank.passing for rank in ranks) - spare,
        share.blocks,
    )


def least_kept(job: Job) -> float:
    """Return the fewest bytes that a block of a job keeps of a micro-batch."""
    return min(kept for kept, _ in block_bytes(job)) * job.stack.footprint.allocator


def first_stages(job: Job) -> tuple[Stage, ...]:
    """Return the stages of the first rank of a pipeline."""
    layout, stages = job.layout, stages_of(job)
    return tuple(
        stages[index]
        for index in stages_of_rank(0, layout.pp, layout.vp, find_schedule(job.schedule).v_shaped)
    )


def first_in_flight(job: Job) -> int:
    """Return the number of forward passes of stages whose activations the first rank of a pipeline
    keeps when its first backward pass begins."""
    return first_forwards(job.schedule, job.layout.pp, job.layout.vp, _enough(job))


def least_in_flight(job: Job, balanced: bool) -> int:
    """Return the fewest micro-batches in flight on the fullest rank: as many as there are stages on
    1F1B's first rank; other schedules have as many or more.

    Args:
        balanced: whether stages have equal work; otherwise the rank with most blocks may have one
            micro-batch in flight.
    """
    return min(job.micro_batches, job.layout.pp) if balanced else 1


def _leanest(job: Job) -> list[Job]:
    """Return the job with the ZeRO stages of which one needs the least memory. Experts may be
    sharded over fewer or more ranks than the rest, so that which one it is depends on the model.
    Stage 0 needs less than stage 1 only if some parameters are on one rank alone."""
    whole = [job.but(zero=0)] if 1 in shard_ranks(job) else []
    reduced = [job.but(zero=2)] if job.layout.pp == 1 or job.reduce == "micro_batch" else []
    return [*whole, job.but(zero=1), *reduced, job.but(zero=3)]


def _spare_bytes(job: Job, share: Stage) -> float:
    """Return the bytes of further copies of gradients, which a single data-parallel rank may not
    have."""
    return (
        job.stack.footprint.spare_gradient
        * sum(parameters_of(job, share))
        * (job.layout.dp * job.layout.cp == 1)
    )


def _smallest_share(job: Job) -> Stage:
    """Return a stage with the blocks that have the fewest parameters, as many as an equal share, or
    as the first stage if that has fewer: the engine gives it fewer where the embedding is large."""
    model, alone = job.model, one_block(job)
    first = split_stages(job.stack.split, model, job.layout.pp)[0].blocks
    counts, rest = [0] * len(alone), min(first, model.layers // job.layout.pp)
    for kind in sorted(range(len(alone)), key=lambda kind: sum(parameters_of(job, alone[kind]))):
        counts[kind] = min(rest, model.counts[kind])
        rest -= counts[kind]
    return Stage(tuple(counts), False, False)


def _enough(job: Job) -> int:
    """Return a number of micro-batches with the same peak in flight as the job's, but fewer to
    play: orders repeat (GPipe and LoopedBFS keep all)."""
    info, layout, count = find_schedule(job.schedule), job.layout, job.micro_batches
    if layout.pp == 1 and layout.vp == 1:
        return min(count, 2)
    if info.name in ("GPipe", "LoopedBFS"):
        return count
    if count % layout.pp == 0:  # three rounds have all moments of more
        return min(count, 3 * layout.pp)
    for fewer in range(4 * layout.pp * layout.vp, count, layout.pp):
        if info.accepts(layout.pp, layout.vp, fewer):
            return fewer
    return count
