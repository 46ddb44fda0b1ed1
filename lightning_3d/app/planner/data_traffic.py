"""Bytes that data-parallel ranks send in a step, inside nodes and between them. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_3d.app.planner.frozen import frozen_weights
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Group, Machine
from lightning_3d.app.planner.stages import parameters_of, stages_of
from lightning_3d.layout.schedules import find_schedule, stages_of_rank


@dataclass(frozen=True)
class DataTraffic:
    """Bytes that a rank sends in a step, on average over the ranks of a node.

    Attributes:
        inside: to ranks of the same node.
        between: to other nodes.
    """

    inside: float = 0.0
    between: float = 0.0

    def __add__(self, other: DataTraffic) -> DataTraffic:
        return DataTraffic(self.inside + other.inside, self.between + other.between)


def data_traffic(job: Job, machine: Machine) -> DataTraffic:
    """Return the traffic of gradients and parameters of the rank with the most parameters, without
    experts that ep splits, and of a frozen second model.

    Collectives are rings: of n ranks, each passes on (n - 1) / n of the bytes of an all-gather or a
    reduce-scatter, and twice as many of an all-reduce. In a ring over several nodes, one of the
    ranks of a node sends to the next node.
    """
    most = max(_parameters(job, rank) for rank in range(job.layout.pp))
    return sum(
        (_passed(ranks, size) for ranks, size in _collectives(job, machine, most)), DataTraffic()
    )


def _parameters(job: Job, rank: int) -> float:
    """Count the parameters of a pipeline rank, without experts that ep splits."""
    layout, stages = job.layout, stages_of(job)
    v_shaped = layout.pp > 1 and find_schedule(job.schedule).v_shaped
    held = [
        parameters_of(job, stages[index])
        for index in stages_of_rank(rank, layout.pp, layout.vp, v_shaped)
    ]
    return sum(dense + (routed if layout.ep == 1 else 0.0) for dense, routed in held)


def _collectives(job: Job, machine: Machine, parameters: float) -> Iterator[tuple[Group, float]]:
    """Yield (ranks, bytes that are gathered or scattered over them in a step)."""
    layout, stack = job.layout, job.stack
    everyone = machine.group(layout, ("dp", "cp"))
    inside, replicas = machine.shard_groups(layout, job.shards)
    gradients = stack.reduced_bytes * parameters * job.trained
    if job.zero == 0:
        yield everyone, 2 * gradients
        return
    times = job.micro_batches if job.reduces_often else 1
    yield everyone if job.is_uneven else inside, times * gradients * (1 if job.scatters else 2)
    if not job.is_uneven:
        yield replicas, 2 * gradients / inside.size
    yield inside, frozen_weights(job).gathered
    times = 2 * job.micro_batches if job.gathers_often else 1
    yield inside, times * job.number * parameters * (1 if job.zero == 3 else job.trained)


def _passed(ranks: Group, size: float) -> DataTraffic:
    passed = (ranks.size - 1) / ranks.size * size
    between = passed / ranks.local if ranks.nodes > 1 else 0.0
    return DataTraffic(passed - between, between)
