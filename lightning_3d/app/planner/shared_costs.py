"""Costs that many candidates of one search have in common, each computed once. Pure Python.

A search prices thousands of jobs that differ only in layout, micro-batch, sequence parallelism,
schedule, recomputation and ZeRO stage. The order of ranks changes no memory. The number of stages
and of data-parallel ranks changes the work of a rank only through the groups that communicate.
`tests/planner/test_shared_costs.py` compares all of them with those that are computed for each job.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from lightning_3d.app.planner.block_costs import BlockWork, message_seconds, work_of
from lightning_3d.app.planner.choices import Fixed, degrees, fitting
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.memory import (
    LeastBytes,
    RankMemory,
    first_in_flight,
    first_stages,
    least_bytes,
    least_in_flight,
    least_kept,
    least_memory,
)
from lightning_3d.app.planner.rank_memory import RankBytes
from lightning_3d.app.planner.step_time import busy_seconds, least_of
from lightning_3d.layout.layout import Layout
from lightning_3d.options.blocks import RECOMPUTE

_ROUNDING = 1e-9
"""Relative difference that is more than rounding, so that no shape that fits exactly is left
out."""


class SharedCosts:
    """Costs of the jobs of one search.

    Attributes:
        levels: levels of recomputation that may be chosen, least first.
    """

    def __init__(self, machine: Machine, fixed: Fixed, room: float) -> None:
        self.levels = (fixed.recompute,) if fixed.recompute else RECOMPUTE
        self._machine, self._fixed, self._room, self._most = (
            machine,
            fixed,
            room,
            room * (1 + _ROUNDING),
        )
        self._works: dict[Hashable, BlockWork] = {}
        self._common: dict[Hashable, tuple[BlockWork, float]] = {}
        self._least: dict[Hashable, str | None] = {}
        self._of_degrees: dict[Hashable, LeastBytes] = {}
        self._kept: dict[Hashable, float] = {}
        self._first: dict[Hashable, tuple[float, float]] = {}
        self._groups: dict[Layout, int] = {}
        self._numbers: dict[Hashable, int] = {}
        self._fitting: dict[Hashable, tuple[Job, RankMemory] | None] = {}

    def least_seconds(self, shape: Job) -> float:
        """Return `least_seconds` of a job."""
        return least_of(shape, self._of_ranks(shape)[1])

    def work(self, job: Job) -> BlockWork:
        """Return `work_of` a job."""
        key = degrees(job), job.layout.order, job.micro_batch, job.sequence_parallel, job.recompute
        if key not in self._works:
            message, host = (
                message_seconds(job, self._machine),
                job.stack.host_seconds(job.layout, self._machine),
            )
            self._works[key] = replace(self._of_ranks(job)[0], message=message, host_block=host)
        return self._works[key]

    def _of_ranks(self, job: Job) -> tuple[BlockWork, float]:
        """Return the work of any job whose ranks do the same, and its `busy_seconds`."""
        key = self._communicating(job.layout), job.micro_batch, job.sequence_parallel, job.recompute
        if key not in self._common:
            work = work_of(job, self._machine)
            self._common[key] = work, busy_seconds(job, work)
        return self._common[key]

    def _communicating(self, layout: Layout) -> int:
        """Return a number that layouts have in common whose ranks communicate alike in tensor,
        context and expert parallelism."""
        if layout not in self._groups:
            machine = self._machine
            groups = (
                machine.group(layout, ("tp",)),
                machine.group(layout, ("cp",)),
                machine.expert_groups(layout, layout.dp)[0],
            )
            self._groups[layout] = self._numbers.setdefault(
                (layout.tp, layout.cp, layout.ep, *groups), len(self._numbers)
            )
        return self._groups[layout]

    def may_fit(self, shape: Job) -> bool:
        """Return False for a shape whose weights, gradients and optimizer state alone do not
        fit."""
        return self._least_bytes(shape).held <= self._most

    def least_recomputation(self, shape: Job) -> str | None:
        """Return the least recomputation with which a shape may fit; None if it does not fit with
        any."""
        key = _without_order(shape)
        if key not in self._least:
            balanced = not self._fixed.fit_stages
            in_flight, (_, passing, blocks) = (
                least_in_flight(shape, balanced),
                self._least_bytes(shape),
            )
            levels = [
                level
                for level in self.levels
                if passing + in_flight * blocks * self._least_kept(shape, level) <= self._most
            ]
            bytes_of_levels = least_memory(shape, levels, balanced=balanced, room=self._room)
            self._least[key] = next(
                (level for level, least in bytes_of_levels if least <= self._room), None
            )
        return self._least[key]

    def _least_bytes(self, shape: Job) -> LeastBytes:
        key = degrees(shape)
        if key not in self._of_degrees:
            self._of_degrees[key] = least_bytes(shape)
        return self._of_degrees[key]

    def _least_kept(self, shape: Job, level: str) -> float:
        layout = shape.layout
        key = layout.tp, layout.cp, layout.ep, shape.micro_batch, shape.sequence_parallel, level
        if key not in self._kept:
            self._kept[key] = least_kept(shape.but(recompute=level))
        return self._kept[key]

    def may_run(self, way: Job) -> bool:
        """Return False for a way whose first rank does not fit when its first backward pass begins,
        or when its optimizer steps."""
        if self._fixed.fit_stages:
            return True
        own = first_stages(way)
        key = degrees(way), way.zero, way.splits_backward, own
        if key not in self._first:
            rank = RankBytes(way).rank(own)
            self._first[key] = rank.held, rank.passing
        held, passing = self._first[key]
        if held > self._most:
            return False
        blocks = first_in_flight(way) * min(stage.blocks for stage in own)
        return passing + blocks * self._least_kept(way, way.recompute) <= self._most

    def fitting(self, way: Job) -> tuple[Job, RankMemory] | None:
        """Return `fitting` of a job."""
        key = (way.schedule, way.recompute, way.zero, way.layout.vp, _without_order(way))
        if key not in self._fitting:
            self._fitting[key] = fitting(way, self._room, self._fixed)
        found = self._fitting[key]
        return found and (found[0].but(layout=way.layout), found[1])


def _without_order(job: Job) -> Hashable:
    return degrees(job), job.micro_batch, job.sequence_parallel
