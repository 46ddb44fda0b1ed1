"""Seconds of a training step and of its parts. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import NamedTuple

from lightning_3d.app.planner.block_costs import BlockWork, CostPart, work_of
from lightning_3d.app.planner.exposed_messages import (
    exposed_in_block,
    exposed_in_frozen,
    exposed_in_step,
)
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.stages import (
    Stage,
    one_block,
    parameters_of,
    shard_ranks,
    stage_kinds,
    stages_of,
)
from lightning_3d.app.planner.timeline import PredictedTimeline, StageSeconds, play
from lightning_3d.layout.pipeline_orders import training_order
from lightning_3d.layout.schedules import find_schedule, predicted_bubble, stages_of_rank

_SHARPNESS = 6
"""Exponent of the smooth maximum of two rates where host and GPU wait for each other: (a^6 +
b^6)^(1/6). Chosen by hand; with the maximum itself, the median error of dense published runs rises
from 5.5 to 6.1 %."""


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step.

    Attributes:
        seconds: duration of the whole step.
        compute: computation of the busiest rank.
        communication: exposed tensor-, context- and expert-parallel communication of the busiest
            rank.
        host: seconds that the GPU waits because the host starts kernels more slowly than they run.
        bubble: seconds that the busiest rank waits for other stages.
        waiting: share of the time of all pipeline ranks, 0 to 1, that they wait for each other; a
            lower bound where the step is one.
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
    timeline: PredictedTimeline | None = None
    waiting: float = 0.0


def _smooth_max(a: float, b: float) -> float:
    if not a or not b:
        return a + b
    largest = max(a, b)
    return largest * ((a / largest) ** _SHARPNESS + (b / largest) ** _SHARPNESS) ** (1 / _SHARPNESS)


def _stage_part(work: BlockWork, stage: Stage, halves: float | None) -> CostPart:
    """Return the seconds of a stage for one micro-batch.

    Args:
        halves: `Stack.halves` if the schedule splits the backward. Then, each of its two passes
            also recomputes what the forward did not keep. The first stage, which no other waits
            for, has one pass (`parallel/pipeline/engine.py`).
    """
    part = work.of(stage.counts)
    if stage.embedding:
        part += work.embedding
    if stage.head:
        part += work.head
    return part if halves is None or stage.embedding else part.recomputed_twice().halved(halves)


def _with_late(job: Job, machine: Machine, work: BlockWork) -> BlockWork:
    """Add to each block, and to a frozen second model, the exposed communication where ZeRO gathers
    parameters or reduces gradients for every micro-batch."""
    if not job.sends_often:
        return work
    held = [parameters_of(job, stage) for stage in one_block(job)]
    blocks = zip(work.blocks, held, strict=True)
    late = tuple(block + exposed_in_block(job, machine, block, own) for block, own in blocks)
    return replace(work, blocks=late, head=work.head + exposed_in_frozen(job, machine), stages={})


def least_seconds(job: Job, machine: Machine) -> float:
    """Return a lower bound for all schedules, splits into stages and ZeRO stages: all work, shared
    by the pipeline's ranks."""
    return least_of(job, busy_seconds(job, work_of(job, machine)))


def busy_seconds(job: Job, work: BlockWork) -> float:
    """Return the seconds of all stages for one micro-batch."""
    whole = work.of(job.model.counts) + work.embedding + work.head
    return sum(whole.seconds()) - whole.weights


def least_of(job: Job, busy: float) -> float:
    """Return `least_seconds` of a job whose `busy_seconds` are known."""
    return job.micro_batches * busy / job.layout.pp + job.stack.host.step


def step_of(
    job: Job,
    machine: Machine,
    *,
    pipeline: str = "simulate",
    keep: bool = False,
    work: BlockWork | None = None,
) -> PredictedStep:
    """Predict a step.

    Args:
        job: the job.
        machine: the cluster.
        pipeline: `simulate` plays the schedule's actions; `bound` returns a lower bound for all
            orders of actions; `estimate` is a formula that is exact for 1F1B with equal stages and
            close for others.
        keep: keep the events of the timeline.
        work: `work_of` a job that differs only in schedule, chunks or ZeRO stage, if it is known.
    """
    layout, stages, work = job.layout, stages_of(job), work or work_of(job, machine)
    seconds = _seconds_of(job, machine, work)
    info = find_schedule(job.schedule or "1F1B")
    owned = _owned(layout.pp, layout.vp, info.v_shaped and layout.pp > 1)
    count = job.micro_batches
    loads = [count * load for load in seconds.of_ranks(owned)[0]]
    timeline = None
    if layout.pp == 1:
        span = loads[0]
    elif pipeline == "simulate":
        timeline = play(
            training_order(job.schedule, layout.pp, layout.vp, count),
            seconds.each,
            work.message,
            keep=keep,
        )
        span = timeline.seconds
    elif pipeline == "bound":
        span = _least_span(seconds, owned, count, work.message, info.split_backward)
    else:
        idle = predicted_bubble(info, layout.pp, layout.vp, count)
        through = sum([one.forward + one.backward for one in seconds.each]) / layout.vp
        span = (
            max(loads) - max(loads) / count + through if layout.vp == 1 else max(loads) / (1 - idle)
        )
        span += 2 * (layout.pp - 1) * work.message
    busiest = max(range(layout.pp), key=loads.__getitem__)
    own = [seconds.gpu[stages[index]] for index in owned[busiest]]
    compute = count * sum(part.forward + part.backward for part in own)
    communication = count * sum(
        part.forward_communication + part.backward_communication for part in own
    )
    distinct = {tuple([stages[index] for index in mine]) for mine in owned}
    held = {stage: parameters_of(job, stage) for stage in seconds.gpu}
    data, optimizer = max(
        [
            _after(job, machine, [held[stage] for stage in mine], seconds.played[mine[0]])
            for mine in distinct
        ],
        key=sum,
    )
    return PredictedStep(
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


class _Seconds(NamedTuple):
    """Seconds of the stages of a job for a micro-batch.

    Attributes:
        gpu: of the GPU, by kind of stage.
        played: including the host that starts kernels, by kind of stage.
        each: the same of every stage, in order.
        ranks: by the number of pipeline ranks and the stages of the first, of all stages of each
            rank: (forward and backward together, gradients of weights).
    """

    gpu: dict[Stage, CostPart]
    played: dict[Stage, StageSeconds]
    each: list[StageSeconds]
    ranks: dict[tuple[int, tuple[int, ...]], tuple[list[float], list[float]]]

    def of_ranks(self, owned: tuple[tuple[int, ...], ...]) -> tuple[list[float], list[float]]:
        """Return what `ranks` says of ranks that have these stages."""
        key = len(owned), owned[0]
        if key not in self.ranks:
            of_stages = (
                [one.forward + one.backward for one in self.each],
                [one.weights for one in self.each],
            )
            whole, weights = (
                [sum([values[index] for index in own]) for own in owned] for values in of_stages
            )
            self.ranks[key] = whole, weights
        return self.ranks[key]


def _seconds_of(job: Job, machine: Machine, work: BlockWork) -> _Seconds:
    """Return the seconds of the stages of a job. All jobs of this work with as many stages have
    them in common."""
    late, splits = _with_late(job, machine, work), job.splits_backward
    key = job.layout.pp * job.layout.vp, job.blocks, splits, work.host_block
    if key not in late.stages:
        gpu, played = {}, {}
        for stage in stage_kinds(job):
            one = stage, splits, work.host_block
            if one not in late.stages:
                part = _stage_part(late, stage, job.stack.halves if splits else None)
                late.stages[one] = (
                    part,
                    _with_host(part, work.host_block * stage.blocks, adds=job.stack.host.computes),
                )
            gpu[stage], played[stage] = late.stages[one]
        each = [played[stage] for stage in stages_of(job)]
        late.stages[key] = _Seconds(gpu, played, each, {})
    seconds: _Seconds = late.stages[key]
    return seconds


def stage_seconds(job: Job, machine: Machine, work: BlockWork) -> list[StageSeconds]:
    """Return the seconds of every stage for a micro-batch.

    Args:
        work: `work_of` the job.
    """
    return _seconds_of(job, machine, work).each


def least_span(job: Job, machine: Machine, work: BlockWork) -> float:
    """Return a lower bound of the seconds for all orders of the schedule's actions, before
    gradients are reduced.

    Args:
        work: `work_of` the job.
    """
    info, layout = find_schedule(job.schedule), job.layout
    owned, seconds = (
        _owned(layout.pp, layout.vp, info.v_shaped and layout.pp > 1),
        _seconds_of(job, machine, work),
    )
    return (
        _least_span(seconds, owned, job.micro_batches, work.message, info.split_backward)
        + job.stack.host.step
    )


@lru_cache(maxsize=1024)
def _owned(pp: int, vp: int, v_shaped: bool) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank."""
    return tuple(stages_of_rank(rank, pp, vp, v_shaped) for rank in range(pp))


def _least_span(
    seconds: _Seconds, owned: tuple[tuple[int, ...], ...], count: int, message: float, split: bool
) -> float:
    """Return a lower bound for all orders of actions.

    A rank starts when an input has passed all stages before its first one and works for its load.
    Its last gradient of an input then passes back through those stages. With a split backward,
    gradients of weights may be computed meanwhile.
    """
    before = seconds.each[: len(owned)]  # every rank has one of them first
    way = accumulate([one.forward + message for one in before], initial=0.0)
    whole, weights = seconds.of_ranks(owned)
    loads = [count * load for load in whole]
    if not split:
        back = accumulate([one.backward + message for one in before], initial=0.0)
        return max(map(sum, zip(way, loads, back, strict=False)))
    back = accumulate([one.backward - one.weights + message for one in before], initial=0.0)
    late = zip(way, loads, back, weights, strict=False)
    return max(
        [there + load + max(0.0, here - count * weight) for there, load, here, weight in late]
    )


def _with_host(part: CostPart, host: float, *, adds: bool) -> StageSeconds:
    """Return the seconds of a stage with a host that needs `host` seconds to start the kernels of
    both passes, a third of it forward.

    Args:
        adds: the host computes itself (`Host.computes`).
    """
    together = add if adds else _smooth_max
    forward = together(part.forward + part.forward_communication, host / 3)
    backward = together(part.backward + part.backward_communication, host * 2 / 3)
    whole = part.backward + part.backward_communication
    return StageSeconds(forward, backward, backward * part.weights / whole if whole else 0.0)


def _after(
    job: Job, machine: Machine, held: Sequence[tuple[float, float]], last: StageSeconds
) -> tuple[float, float]:
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
    return (
        exposed_in_step(job, machine, held, forward=last.forward, backward=last.backward),
        optimizer,
    )
