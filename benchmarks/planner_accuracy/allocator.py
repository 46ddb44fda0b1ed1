"""Memory of published software at the peak of a step, with its caching allocator. Pure Python.

A caching allocator asks the driver for a block of its own for each large tensor, and does not give
it back: a tensor that is larger than every block which a pass has left comes on top of all of them,
though it is needed at another time (`_on_top`). Where memory is short, it gives back what it holds
in reserve.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from benchmarks.planner_accuracy.software import Allocator, Published
from lightning_3d.app.planner.block_memory import BlockBytes, block_bytes
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.memory import stages_in_flight
from lightning_3d.app.planner.rank_memory import RankMemory, StagesOfRank, memory_of_rank
from lightning_3d.app.planner.stages import parameters_of
from lightning_3d.app.planner.step_time import PredictedStep

_WORD = 4
"""Bytes of a number in 32 bits."""


def software_of(job: Job) -> Published:
    """Return the software of a job.

    Raises:
        TypeError: the software is not `Published`.
    """
    if not isinstance(job.stack, Published):
        raise TypeError("The job runs this package, whose allocator is not described here.")
    return job.stack


def queue_of(step: PredictedStep, job: Job) -> float:
    """Predict how far the host runs ahead of the GPU: the GPU's work, divided by this work and the
    time that it waits for the host. It is 1 where the host is much faster."""
    busy = step.compute + step.communication
    return busy / (busy + step.host - job.stack.host.step)


def allocated(
    job: Job, *, queue: float = 1.0, room: float = float("inf"), first: bool = False
) -> RankMemory:
    """Predict the memory of the rank that needs most.

    Args:
        queue: share of the tensors that may wait to be freed during collectives that do wait; 0
            where the host is slower than the GPU. With no more micro-batches than stages the GPU is
            idle before the first backward pass, and nothing waits any more.
        room: bytes beyond which the allocator gives back its reserves before it asks for more:
            spare gradients, copies, tensors that wait, and the unused ends of its blocks.
        first: return the memory of the first pipeline rank instead.
    """
    layout, stack = job.layout, software_of(job)
    if layout.pp > 1 and job.micro_batches <= layout.pp:
        queue = 0.0
    ranks, blocks = stages_in_flight(job), block_bytes(job)
    considered = set(ranks[:1] if first else ranks)
    fullest, own = max(
        ((_rank(job, one, queue, blocks), one) for one in considered),
        key=lambda pair: pair[0].total,
    )
    if fullest.total <= room:
        return fullest
    footprint = replace(stack.footprint, spare_gradient=0.0, allocator=1.0)
    lean = _rank(
        replace(job, stack=replace(stack, footprint=footprint, allocator=Allocator())),
        own,
        0.0,
        blocks,
    )
    share = max(0.0, room - lean.total) / max(1.0, fullest.total - lean.total)
    return RankMemory(
        **{
            name: least + share * (getattr(fullest, name) - least)
            for name, least in asdict(lean).items()
        }
    )


def _rank(job: Job, own: StagesOfRank, queue: float, blocks: BlockBytes) -> RankMemory:
    memory = memory_of_rank(job, own, blocks)
    waiting = (
        queue
        * software_of(job).allocator.queued
        * 2
        * job.tokens
        * job.model.hidden
        * (job.layout.tp > 1)
    )
    return replace(
        memory, gradients=memory.gradients + _on_top(job, own), other=memory.other + waiting
    )


def _on_top(job: Job, own: StagesOfRank) -> float:
    """Bytes of tensors that do not live together with the activations but are larger than each of
    their blocks: the gradient of the embedding, and the copies in which parameters are gathered.
    And buckets of gradients, which always live."""
    model, tp, sharers = job.model, job.layout.tp, job.layout.dp * job.layout.cp
    allocator, stages = software_of(job).allocator, own.stages
    parameters = sum(sum(parameters_of(job, stage)) for stage in stages)
    inner = (2 if model.gated else 1) * max(model.ffn, model.expert_ffn) / tp
    logits = _WORD * model.vocab / tp if any(stage.head for stage in stages) else 0.0
    largest = job.tokens * max(job.width * inner, logits, job.width * model.hidden)
    size = 0.0
    if sharers > 1 and job.zero == 0:
        size += allocator.bucket_bytes * parameters
    elif sharers > 1 and job.zero == 1:
        whole = job.weight_bytes * parameters
        size += sum(
            whole
            for copy in range(allocator.gathered_copies)
            if (whole if copy else whole / sharers) > largest
        )
    return size
