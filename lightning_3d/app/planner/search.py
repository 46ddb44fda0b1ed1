"""Search for the fastest layouts of a model on a cluster that fit. Pure Python.

A best-first search with lower bounds (Hart, Nilsson and Raphael, 1968,
doi:10.1109/TSSC.1968.300136). A queue orders layouts by a lower bound of their step. If a layout is
first in the queue, the least recomputation with which it may fit gives it a higher bound. If it is
first again, its schedules replace it, each with its own bound. If a schedule is first, the ways to
run it replace it: its ZeRO stages, each with the least recomputation with which the first rank may
fit. A way that recomputes more than its schedule, or sends messages for every micro-batch, has a
bound of its own before its step is priced. If a priced way is first, its memory is asked for. One
that does not fit is replaced by the same way with more recomputation; one that fits is simulated,
and its time replaces the bound. A simulated schedule that is first is the fastest of all that
remain. So only a few are simulated, and the memory of most is never asked for.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from lightning_3d.app.planner.block_costs import BlockWork
from lightning_3d.app.planner.choices import (
    Fixed,
    degrees,
    more_recomputed,
    node_shard_size,
    runnable,
    schedules,
    shapes,
    ways,
)
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.memory import memory_of
from lightning_3d.app.planner.rank_memory import RankMemory
from lightning_3d.app.planner.shared_costs import SharedCosts
from lightning_3d.app.planner.step_time import PredictedStep, least_span, step_of

MOST_SIMULATED = 30
"""Most candidates that are simulated."""

_WORTH_SHARD_GROUPS = 0.01
"""Least share of a step that shard groups must save: they need more memory."""


@dataclass(frozen=True)
class Candidate:
    """A way to train, its step and the memory of its fullest rank."""

    job: Job
    step: PredictedStep
    memory: RankMemory


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        best: fastest candidates first, each with other degrees of parallelism.
        simulated: candidates whose schedule was simulated, and whose ranks wait no longer than they
            may.
        seen: simulated candidates, and those without a pipeline, which need no simulation.
        shapes: number of combinations of degrees, micro-batch and order that divide model and
            batch.
        expanded: number of shapes whose bound was low enough to look at their schedules.
    """

    best: tuple[Candidate, ...]
    simulated: tuple[Candidate, ...]
    seen: tuple[Candidate, ...]
    shapes: int
    expanded: int


def search(
    job: Job,
    machine: Machine,
    *,
    fixed: Fixed | None = None,
    most: int = 5,
    limit: int = MOST_SIMULATED,
    room: float | None = None,
    below: float = inf,
) -> SearchResult:
    """Find the fastest candidates with different degrees of parallelism.

    Args:
        job: model, batch and precision; its layout is not used.
        machine: cluster, all of whose GPUs are used.
        fixed: values that are not searched.
        most: layouts to return.
        limit: most candidates to simulate.
        room: most bytes of a GPU that may be predicted; None: all of its memory.
        below: seconds of a step; slower candidates are not looked for.

    Returns:
        The result; its `best` is empty when nothing fits.
    """
    room = machine.memory if room is None else room
    return _Search(job, machine, fixed or Fixed(), room).run(most, limit, below)


class _Unpriced(NamedTuple):
    """A way to run a job whose step is known to take longer than another one, but not how long."""

    job: Job


class _Way(NamedTuple):
    """A way to run a job whose memory has not been asked for.

    Attributes:
        job: the job.
        step: lower bound of its step, which is exact without a pipeline.
        grouped: the same in shard groups, if these save time (`_in_shard_groups`).
    """

    job: Job
    step: PredictedStep
    grouped: tuple[Job, PredictedStep] | None


_Item = Job | _Unpriced | _Way | tuple[Job, RankMemory] | Candidate
"""What the queue holds: a shape (a job without a schedule), a job with one, a way to run it, one
that fits, or a candidate whose step is known."""


class _Search:
    """The queue of a search, and what it has found so far."""

    def __init__(self, job: Job, machine: Machine, fixed: Fixed, room: float) -> None:
        self._machine, self._fixed, self._room = machine, fixed, room
        self._costs = SharedCosts(machine, fixed, room)
        considered = list(shapes(job.but(recompute=self._costs.levels[0]), machine, fixed))
        self._shapes = self._pushed = len(considered)
        places = [
            (place, shape) for place, shape in enumerate(considered) if self._costs.may_fit(shape)
        ]
        self._queue: list[tuple[float, int, _Item]]
        self._queue = [(self._costs.least_seconds(shape), place, shape) for place, shape in places]
        heapq.heapify(self._queue)
        self._best: dict[tuple[int, ...], Candidate] = {}
        self._simulated: list[Candidate] = []
        self._known: list[Candidate] = []
        self._expanded = 0

    def run(self, most: int, limit: int, below: float) -> SearchResult:
        """Take the first of the queue until `most` layouts are found; see `search`."""
        while self._queue and len(self._best) < most:
            bound, number, item = heapq.heappop(self._queue)
            if bound >= below:
                break
            if isinstance(item, Candidate):
                self._known += [item] if item.job.layout.pp == 1 else []
                self._best.setdefault(degrees(item.job), item)
            elif isinstance(item, Job) and item.schedule:
                self._push_ways(bound, item)
            elif isinstance(item, Job):
                self._push_schedules(bound, number, item)
            elif isinstance(item, _Unpriced):
                self._push_way(bound, item.job)
            elif isinstance(item, _Way):
                self._push_fitting(bound, item)
            elif degrees(item[0]) not in self._best:
                if len(self._simulated) == limit:
                    break
                self._simulate(*item)
        # Where the limit was reached, the rest is in order of what was simulated.
        for one in sorted([*self._simulated, *self._known], key=lambda one: one.step.seconds):
            if len(self._best) < most and one.step.seconds < below:
                self._best.setdefault(degrees(one.job), one)
        ordered = tuple(sorted(self._best.values(), key=lambda one: one.step.seconds))
        simulated, known = tuple(self._simulated), tuple(self._known)
        return SearchResult(ordered, simulated, simulated + known, self._shapes, self._expanded)

    def _is_found(self, job: Job) -> bool:
        """Return whether a faster candidate with the same degrees is known. (Of layouts without a
        pipeline, all are kept.)"""
        return job.layout.pp > 1 and degrees(job) in self._best

    def _push(self, seconds: float, item: _Item) -> None:
        heapq.heappush(self._queue, (seconds, self._pushed, item))
        self._pushed += 1

    def _push_schedules(self, bound: float, number: int, shape: Job) -> None:
        """Replace a shape by its schedules, or by itself with the recomputation that it needs in
        order to fit."""
        level = self._costs.least_recomputation(shape)
        if level is None:
            return
        if level != shape.recompute:
            lean = shape.but(recompute=level)
            heapq.heappush(self._queue, (self._costs.least_seconds(lean), number, lean))
            return
        self._expanded += 1
        for scheduled in schedules(shape, self._fixed):
            runs = runnable(scheduled, self._fixed)
            if runs is not None:
                self._push(
                    max(bound, least_span(runs, self._machine, self._costs.work(runs))), runs
                )

    def _push_ways(self, bound: float, scheduled: Job) -> None:
        """Replace a job by the ways to run it, each with a lower bound of its step."""
        if self._is_found(scheduled):
            return
        for job in ways(scheduled, self._fixed):
            lean = self._with_room(job)
            if lean is job and not job.sends_often:  # the bound is of it
                self._push_way(bound, job)
            elif lean is not None:
                self._push_unpriced(bound, lean)

    def _with_room(self, job: Job | None) -> Job | None:
        """Return a way to run a job with the least recomputation with which its first rank may fit;
        None if it does not fit with any."""
        while job is not None and not self._costs.may_run(job):
            job = more_recomputed(job, self._fixed)
        return job

    def _push_unpriced(self, bound: float, job: Job) -> None:
        """Add a way to run a job that may take longer than the bound: it recomputes more, or sends
        messages for every micro-batch."""
        least = self._least(job)
        if least > bound:
            self._push(least, _Unpriced(job))
        else:
            self._push_way(bound, job)

    def _least(self, job: Job) -> float:
        """Return a lower bound of the step of a way to run a job, also in shard groups, whose
        messages take less time."""
        if not job.sends_often:
            return self._costs.least_seconds(job)
        work, size = self._costs.work(job), node_shard_size(job, self._machine)
        forms = [job] if size is None else [job, job.but(shard_size=size)]
        return min(least_span(each, self._machine, work) for each in forms)

    def _push_way(self, bound: float, job: Job) -> None:
        """Price a way to run a job, and add it."""
        if self._is_found(job):
            return
        way = self._way(job)
        if way.step.waiting > self._fixed.max_bubble:
            return
        least = (
            min(way.step.seconds, way.grouped[1].seconds)
            if way.grouped is not None
            else way.step.seconds
        )
        self._push(max(bound, least), way)

    def _way(self, job: Job) -> _Way:
        work = self._costs.work(job)
        step = step_of(job, self._machine, pipeline="bound", work=work)
        return _Way(job, step, _in_shard_groups(job, step, self._machine, work))

    def _push_fitting(self, bound: float, way: _Way) -> None:
        """Replace a way to run a job by those of its forms that fit, or by the same way with more
        recomputation."""
        if self._is_found(way.job):
            return
        found = self._costs.fitting(way.job)
        if found is None:
            lean = self._with_room(more_recomputed(way.job, self._fixed))
            if lean is not None:
                self._push_unpriced(bound, lean)
            return
        job, memory = found
        if job.blocks != way.job.blocks:
            way = self._way(job)
        forms = [Candidate(job, way.step, memory)]
        if way.grouped is not None and (memory := memory_of(way.grouped[0])).total <= self._room:
            forms.append(Candidate(*way.grouped, memory))
        for each in forms:
            self._push(
                max(bound, each.step.seconds),
                each if job.layout.pp == 1 else (each.job, each.memory),
            )

    def _simulate(self, job: Job, memory: RankMemory) -> None:
        one = Candidate(job, step_of(job, self._machine, work=self._costs.work(job)), memory)
        if one.step.waiting <= self._fixed.max_bubble:
            self._simulated.append(one)
            self._push(one.step.seconds, one)


def _in_shard_groups(
    job: Job, step: PredictedStep, machine: Machine, work: BlockWork
) -> tuple[Job, PredictedStep] | None:
    """Return a job with the largest shard groups that are each on one node, and a lower bound of
    its step, if dp spans nodes and they save time.

    Args:
        step: lower bound of the step without these groups.
        work: `work_of` the job.
    """
    size = node_shard_size(job, machine)
    if size is None:
        return None
    # nothing else gets faster
    if not job.sends_often and step.data <= _WORTH_SHARD_GROUPS * step.seconds:
        return None
    grouped = job.but(shard_size=size)
    bound = step_of(grouped, machine, pipeline="bound", work=work)
    return (grouped, bound) if bound.seconds < (1 - _WORTH_SHARD_GROUPS) * step.seconds else None
