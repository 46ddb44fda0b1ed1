"""Seconds of a training step and of its parts. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add

from lightning_3d.layout.pipeline_orders import training_order
from lightning_3d.layout.schedules import find_schedule, predicted_bubble, stages_of_rank
from lightning_3d.planner.block_costs import Part, Work, work_of
from lightning_3d.planner.exposed_messages import exposed_in_block, exposed_in_frozen, exposed_in_step
from lightning_3d.planner.job import Job
from lightning_3d.planner.machine import Machine
from lightning_3d.planner.stages import Stage, one_block, parameters_of, shard_ranks, stage_kinds, stages_of
from lightning_3d.planner.timeline import StageSeconds, Timeline, play

_SHARPNESS = 6
"""Exponent of the smooth maximum of two rates where host and GPU wait for each other: (a^6 + b^6)^(1/6). Chosen by hand; with the maximum
itself, the median error of dense published runs rises from 5.5 to 6.1 %."""


@dataclass(frozen=True)
class Step:
    """A predicted step.

    Attributes:
        seconds: duration of the whole step.
        compute: computation of the busiest rank.
        communication: exposed tensor-, context- and expert-parallel communication of the busiest rank.
        host: seconds that the GPU waits because the host starts kernels more slowly than they run.
        bubble: seconds that the busiest rank waits for other stages.
        waiting: share of the time of all pipeline ranks, 0 to 1, that they wait for each other; a lower bound where the step is one.
        data: exposed time of reducing gradients and gathering parameters.
        optimizer: optimizer step.
        timeline: timeline of the pipeline; None for a bound.
    """

    seconds: float
    compute: float
    communication: float
    host: float
    bubble: float
    data: float
    optimizer: float
    timeline: Timeline | None = None
    waiting: float = 0.0


def _smooth_max(a: float, b: float) -> float:
    if not a or not b:
        return a + b
    largest = max(a, b)
    return largest * ((a / largest) ** _SHARPNESS + (b / largest) ** _SHARPNESS) ** (1 / _SHARPNESS)


def _stage_part(work: Work, stage: Stage, halves: float | None) -> Part:
    """Return the seconds of a stage for one micro-batch.

    Args:
        halves: `Stack.halves` if the schedule splits the backward. Then, each of its two passes also recomputes what the forward did not
            keep. The first stage, which no other waits for, has one pass (`parallel/pipeline/engine.py`).
    """
    part = work.of(stage.counts)
    if stage.embedding:
        part += work.embedding
    if stage.head:
        part += work.head
    return part if halves is None or stage.embedding else part.recomputed_twice().halved(halves)


def _with_late(job: Job, machine: Machine, work: Work) -> Work:
    """Add to each block, and to a frozen second model, the exposed communication where ZeRO gathers parameters or reduces gradients for
    every micro-batch."""
    if not job.gathers_frozen_often and not job.reduces_often:
        return work
    held = [parameters_of(job, stage) for stage in one_block(job)]
    blocks = zip(work.blocks, held, strict=True)
    late = tuple(block + exposed_in_block(job, machine, block, own) for block, own in blocks)
    return replace(work, blocks=late, head=work.head + exposed_in_frozen(job, machine), stages={})


def least_seconds(job: Job, machine: Machine) -> float:
    """Return a lower bound for all schedules, splits into stages and ZeRO stages: all work, shared by the pipeline's ranks."""
    return least_of(job, busy_seconds(job, work_of(job, machine)))


def busy_seconds(job: Job, work: Work) -> float:
    """Return the seconds of all stages for one micro-batch."""
    whole = work.of(job.model.counts) + work.embedding + work.head
    return sum(whole.seconds()) - whole.weights


def least_of(job: Job, busy: float) -> float:
    """Return `least_seconds` of a job whose `busy_seconds` are known."""
    return job.micro_batches * busy / job.layout.pp + job.stack.host.step


def step_of(job: Job, machine: Machine, *, pipeline: str = "simulate", keep: bool = False, work: Work | None = None) -> Step:
    """Predict a step.

    Args:
        job: the job.
        machine: the cluster.
        pipeline: `simulate` plays the schedule's actions; `bound` returns a lower bound for all orders of actions; `estimate` is a formula
            that is exact for 1F1B with equal stages and close for others.
        keep: keep the events of the timeline.
        work: `work_of` a job that differs only in schedule, chunks or ZeRO stage, if it is known.
    """
    layout, stages, work = job.layout, stages_of(job), work or work_of(job, machine)
    kinds, played = _stage_seconds(job, machine, work)
    seconds = [played[stage] for stage in stages]
    info = find_schedule(job.schedule or "1F1B")
    owned = _owned(layout.pp, layout.vp, info.v_shaped and layout.pp > 1)
    count = job.micro_batches
    whole = [one.forward + one.backward for one in seconds]
    loads = _loads(whole, owned, count)
    timeline = None
    if layout.pp == 1:
        span = loads[0]
    elif pipeline == "simulate":
        timeline = play(training_order(job.schedule, layout.pp, layout.vp, count), seconds, work.message, keep=keep)
        span = timeline.seconds
    elif pipeline == "bound":
        span = _least_span(seconds, owned, count, work.message, info.split_backward)
    else:
        idle = predicted_bubble(info, layout.pp, layout.vp, count)
        through = sum(whole) / layout.vp
        span = max(loads) - max(loads) / count + through if layout.vp == 1 else max(loads) / (1 - idle)
        span += 2 * (layout.pp - 1) * work.message
    busiest = max(range(layout.pp), key=loads.__getitem__)
    own = [kinds[stages[index]] for index in owned[busiest]]
    compute = count * sum(part.forward + part.backward for part in own)
    communication = count * sum(part.forward_communication + part.backward_communication for part in own)
    distinct = {tuple([stages[index] for index in mine]) for mine in owned}
    held = {stage: parameters_of(job, stage) for stage in kinds}
    data, optimizer = max([_after(job, machine, [held[stage] for stage in mine], played[mine[0]]) for mine in distinct], key=sum)
    return Step(
        seconds=span + data + optimizer + job.stack.host.step,
        compute=compute,
        communication=communication,
        host=max(0.0, loads[busiest] - compute - communication) + job.stack.host.step,
        bubble=span - loads[busiest],
        data=data,
        optimizer=optimizer,
        timeline=timeline,
        waiting=max(0.0, 1 - sum(loads) / (layout.pp * span)) if layout.pp > 1 else 0.0,
    )


def _stage_seconds(job: Job, machine: Machine, work: Work) -> tuple[dict[Stage, Part], dict[Stage, StageSeconds]]:
    """Return for each kind of stage, for a micro-batch: (seconds of the GPU, seconds including the host that starts kernels)."""
    late, splits, parts, played = _with_late(job, machine, work), job.splits_backward, {}, {}
    for stage in stage_kinds(job):
        key = stage, splits, work.host_block
        if key not in late.stages:
            part = _stage_part(late, stage, job.stack.halves if splits else None)
            late.stages[key] = part, _with_host(part, work.host_block * stage.blocks, adds=job.stack.host.computes)
        parts[stage], played[stage] = late.stages[key]
    return parts, played


def stage_seconds(job: Job, machine: Machine, work: Work) -> list[StageSeconds]:
    """Return the seconds of every stage for a micro-batch.

    Args:
        work: `work_of` the job.
    """
    _, played = _stage_seconds(job, machine, work)
    return [played[stage] for stage in stages_of(job)]


def least_span(job: Job, work: Work, seconds: Sequence[StageSeconds]) -> float:
    """Return a lower bound of the seconds for all orders of the schedule's actions, before gradients are reduced.

    Args:
        work: `work_of` the job.
        seconds: seconds of every stage for a micro-batch.
    """
    info, layout = find_schedule(job.schedule), job.layout
    owned = _owned(layout.pp, layout.vp, info.v_shaped and layout.pp > 1)
    return _least_span(seconds, owned, job.micro_batches, work.message, info.split_backward) + job.stack.host.step


@lru_cache(maxsize=1024)
def _owned(pp: int, vp: int, v_shaped: bool) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank."""
    return tuple(stages_of_rank(rank, pp, vp, v_shaped) for rank in range(pp))


def _least_span(seconds: Sequence[StageSeconds], owned: tuple[tuple[int, ...], ...], count: int, message: float, split: bool) -> float:
    """Return a lower bound for all orders of actions.

    A rank starts when an input has passed all stages before its first one and works for its load. Its last gradient of an input then
    passes back through those stages. With a split backward, gradients of weights may be computed meanwhile.
    """
    before = seconds[: len(owned)]  # every rank has one of them first
    way = accumulate([one.forward + message for one in before], initial=0.0)
    loads = _loads([one.forward + one.backward for one in seconds], owned, count)
    if not split:
        back = accumulate([one.backward + message for one in before], initial=0.0)
        return max(map(sum, zip(way, loads, back, strict=False)))
    late = _loads([one.weights for one in seconds], owned, count)
    back = accumulate([one.backward - one.weights + message for one in before], initial=0.0)
    return max([there + load + max(0.0, here - weights) for there, load, here, weights in zip(way, loads, back, late, strict=False)])


def _loads(seconds: Sequence[float], owned: tuple[tuple[int, ...], ...], count: int) -> list[float]:
    """Return the seconds of `count` micro-batches on each pipeline rank."""
    if len(owned[0]) == 1:
        return [count * one for one in seconds]
    return [count * sum([seconds[index] for index in own]) for own in owned]


def _with_host(part: Part, host: float, *, adds: bool) -> StageSeconds:
    """Return the seconds of a stage with a host that needs `host` seconds to start the kernels of both passes, a third of it forward.

    Args:
        adds: the host computes itself (`Host.computes`).
    """
    together = add if adds else _smooth_max
    forward = together(part.forward + part.forward_communication, host / 3)
    backward = together(part.backward + part.backward_communication, host * 2 / 3)
    whole = part.backward + part.backward_communication
    return StageSeconds(forward, backward, backward * part.weights / whole if whole else 0.0)


def _after(job: Job, machine: Machine, held: Sequence[tuple[float, float]], last: StageSeconds) -> tuple[float, float]:
    """Return (seconds of exposed reduction and gathering, seconds of the optimizer) of a rank.

    Args:
        held: (parameters, parameters of routed experts) of each stage of the rank.
        last: seconds of its first stage.
    """
    dense, routed = map(sum, zip(*held, strict=True))
    traffic, (ranks, of_experts) = job.stack.traffic, shard_ranks(job)
    owned = stepped = job.trained * (dense + routed)
    moved = owned * traffic.whole
    if job.zero:
        stepped = job.trained * (dense / ranks + routed / of_experts)
        moved += owned * traffic.gathered * (ranks > 1 and not job.gathers_often)
    optimizer = (moved + stepped * (traffic.parameter - traffic.whole)) / machine.memory_rate
    return exposed_in_step(job, machine, held, forward=last.forward, backward=last.backward), optimizer
