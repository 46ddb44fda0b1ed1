"""Seconds of ZeRO's messages that computation does not hide: gradients that are reduced, and
parameters that are gathered. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_3d.app.planner.block_costs import CostPart, work_of
from lightning_3d.app.planner.frozen import alone
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Group, Machine, all_reduce, gather, reduce_scatter
from lightning_3d.app.planner.stages import one_block, parameters_of

_HIDDEN, _LATE = 0.8, 0.1
"""Share of a pass that communication can hide behind, and share of a message that is never hidden.
Chosen by hand: with 1 and 0, the median error of dense published runs rises from 5.5 to 5.6 %."""


class _Tier(NamedTuple):
    """Parameters of a rank that the same ranks have.

    Attributes:
        size: number of the parameters.
        first: number of those in the rank's first stage.
        shards: ranks over which ZeRO shards them.
        everyone: all ranks of the stage that have them.
        late: True if gradients are reduced once in a step, when the last backward of a stage is
            over (`Job.reduces_experts_late`), and at ZeRO 3 with an all-reduce.
    """

    size: float
    first: float
    shards: Group
    everyone: Group
    late: bool = False


def _tiers(job: Job, machine: Machine, held: Sequence[tuple[float, float]]) -> list[_Tier]:
    """Return the tiers of stages with so many (parameters, parameters of routed experts)."""
    layout = job.layout
    if layout.ep == 1:
        held = [(sum(each), 0.0) for each in held]
    dense, routed = map(sum, zip(*held, strict=True))
    ranks, _ = machine.shard_groups(layout, job.shards)
    tiers = [_Tier(dense, held[0][0], ranks, machine.group(layout, ("dp", "cp")))]
    if routed:
        same, everyone = (
            machine.expert_groups(layout, shards)[1] for shards in (job.shards, layout.dp)
        )
        tiers.append(_Tier(routed, held[0][1], same, everyone, job.reduces_experts_late))
    return tiers


def exposed_in_block(
    job: Job, machine: Machine, block: CostPart, held: tuple[float, float]
) -> CostPart:
    """Return the exposed messages of a block, if ZeRO gathers its parameters or reduces its
    gradients for every micro-batch.

    Args:
        block: computation and other messages of the block.
        held: its (parameters, parameters of routed experts) on a rank.
    """
    stack, tiers = job.stack, _tiers(job, machine, [held])
    ranks = tiers[0].shards
    if (
        job.gathers_often
        and (once := stack.exposed_gather(machine, ranks, job.number * sum(held))) is not None
    ):
        again = 1 + (job.recompute == "full") + job.reduces_often
        return CostPart(forward_communication=once, backward_communication=again * once)
    whole = scatter = 0.0
    for tier in tiers:
        if job.gathers_often:
            whole += gather(machine, tier.shards, job.number * tier.size)
        if job.reduces_often and not tier.late:
            scatter += _summed(job, machine, tier)
    hidden = _HIDDEN if stack.overlap.blocks else 0.0
    forward, backward = (
        block.forward + block.forward_communication,
        block.backward + block.backward_communication,
    )
    return CostPart(
        forward_communication=max(_LATE * whole, whole - hidden * forward),
        backward_communication=max(_LATE * (whole + scatter), whole + scatter - hidden * backward),
    )


def exposed_in_frozen(job: Job, machine: Machine) -> CostPart:
    """Return the exposed gathers of a frozen second model in one micro-batch, where ZeRO 3 gathers
    its blocks one at a time."""
    second = alone(job)
    if second is None or not job.gathers_frozen_often:
        return CostPart()
    ranks, _ = machine.shard_groups(job.layout, job.shards)
    hidden = _HIDDEN if job.stack.overlap.blocks else 0.0
    exposed = 0.0
    for count, block, stage in zip(
        second.model.counts, work_of(second, machine).blocks, one_block(second), strict=True
    ):
        whole = gather(machine, ranks, job.frozen_bytes * sum(parameters_of(second, stage)))
        exposed += count * max(
            _LATE * whole, whole - hidden * (block.forward + block.forward_communication)
        )
    return CostPart(forward_communication=exposed)


def exposed_in_step(
    job: Job,
    machine: Machine,
    held: Sequence[tuple[float, float]],
    *,
    forward: float,
    backward: float,
) -> float:
    """Return the exposed seconds of what a rank reduces and gathers once in a step.

    Reductions hide behind the backward pass of the last micro-batch of the rank's first stage. If
    gradients are sent by whole stages, only those of its other stages do. Where shards have
    replicas, an all-reduce of the rank's shard follows. It hides there too, unless gradients are in
    one tensor or wait for the end of their stage. Gathers hide behind the forward pass of that
    stage, if they overlap.

    Args:
        held: (parameters, parameters of routed experts) of each stage of the rank.
        forward: seconds of the forward pass of its first stage.
        backward: seconds of the backward pass of its first stage.
    """
    overlap = job.stack.overlap
    reduce = least = behind = spread = 0.0
    for tier in _tiers(job, machine, held):
        once, across = _reduction(job, machine, tier)
        waits = job.sends_whole_stages or tier.late
        if job.buffers_all_gradients or tier.late:
            behind += across
        else:
            once += across
        reduce += once
        least += once * (max(_LATE, tier.first / max(1.0, tier.size)) if waits else _LATE)
        if job.zero and not job.gathers_often:
            spread += gather(machine, tier.shards, job.number * tier.size * job.trained)
    if overlap.data if job.zero else overlap.all_reduce:
        reduce = max(reduce - _HIDDEN * backward, least)
    if overlap.gather or (job.overlap_gather and job.zero in (1, 2)):
        spread = max(spread - _HIDDEN * forward, _LATE * spread)
    return reduce + behind + spread


def _reduction(job: Job, machine: Machine, tier: _Tier) -> tuple[float, float]:
    """Return the seconds in which gradients are (reduced over the ranks that shard them, or over
    all; then summed over replicas)."""
    _, replicas = machine.shard_groups(job.layout, job.shards)
    across = 0.0
    if job.zero and replicas.size > 1 and not job.is_uneven:
        across = all_reduce(
            machine, replicas, job.stack.reduced_bytes * tier.size * job.trained / tier.shards.size
        )
    often = job.reduces_often and not tier.late
    return 0.0 if often else _summed(job, machine, tier), across


def _summed(job: Job, machine: Machine, tier: _Tier) -> float:
    """Return the seconds in which gradients are summed once over the ranks that shard them, or over
    all: by a reduce-scatter, or by an all-reduce where every rank gets the sums."""
    ranks = tier.everyone if job.zero == 0 or job.is_uneven else tier.shards
    scatters = job.scatters and not (tier.late and job.zero == 3)
    return (reduce_scatter if scatters else all_reduce)(
        machine, ranks, job.stack.reduced_bytes * tier.size * job.trained
    )
