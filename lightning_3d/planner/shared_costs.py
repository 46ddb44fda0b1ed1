"""Costs that many candidates of one search have in common, each computed once. Pure Python.

A search prices thousands of jobs that differ only in layout, micro-batch, sequence parallelism, schedule, recomputation and ZeRO stage.
The order of ranks changes no memory. The number of stages and of data-parallel ranks changes the work of a rank only through the groups
that communicate. `tests/planner/test_shared_costs.py` compares all of them with those that are computed for each job.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from lightning_3d.config.options.blocks import RECOMPUTE
from lightning_3d.layout.layout import Layout
from lightning_3d.planner.block_costs import Work, message_seconds, work_of
from lightning_3d.planner.choices import Fixed, degrees, fitting
from lightning_3d.planner.job import Job
from lightning_3d.planner.machine import Machine
from lightning_3d.planner.memory import Memory, least_held, least_memory
from lightning_3d.planner.step_time import busy_seconds, least_of

_ROUNDING = 1e-9
"""Relative difference that is more than rounding, so that no shape that fits exactly is left out."""


class SharedCosts:
    """Costs of the jobs of one search.

    Attributes:
        levels: levels of recomputation that may be chosen, least first.
    """

    def __init__(self, machine: Machine, fixed: Fixed, room: float) -> None:
        self.levels = (fixed.recompute,) if fixed.recompute else RECOMPUTE
        self._machine, self._fixed, self._room = machine, fixed, room
        self._works: dict[Hashable, tuple[Work, float]] = {}
        self._least: dict[Hashable, str | None] = {}
        self._held: dict[Hashable, bool] = {}
        self._groups: dict[Layout, Hashable] = {}
        self._fitting: dict[Hashable, tuple[Job, Memory] | None] = {}

    def least_seconds(self, shape: Job) -> float:
        """Return `least_seconds` of a job."""
        return least_of(shape, self._of_ranks(shape)[1])

    def work(self, job: Job) -> Work:
        """Return `work_of` a job."""
        message, host = message_seconds(job, self._machine), job.stack.host_seconds(job.layout, self._machine)
        return replace(self._of_ranks(job)[0], message=message, host_block=host)

    def _of_ranks(self, job: Job) -> tuple[Work, float]:
        """Return the work of any job whose ranks do the same, and its `busy_seconds`."""
        layout, machine = job.layout, self._machine
        if layout not in self._groups:
            communicating = machine.group(layout, ("tp",)), machine.group(layout, ("cp",)), machine.expert_groups(layout, layout.dp)[0]
            self._groups[layout] = layout.tp, layout.cp, layout.ep, *communicating
        key = (self._groups[layout], job.micro_batch, job.sequence_parallel, job.recompute)
        if key not in self._works:
            work = work_of(job, machine)
            self._works[key] = work, busy_seconds(job, work)
        return self._works[key]

    def may_fit(self, shape: Job) -> bool:
        """Return False for a shape whose weights, gradients and optimizer state alone do not fit."""
        key = degrees(shape)
        if key not in self._held:
            self._held[key] = least_held(shape) <= self._room * (1 + _ROUNDING)
        return self._held[key]

    def least_recomputation(self, shape: Job) -> str | None:
        """Return the least recomputation with which a shape may fit; None if it does not fit with any."""
        key = _without_order(shape)
        if key not in self._least:
            bytes_of_levels = least_memory(shape, self.levels, balanced=not self._fixed.fit_stages, room=self._room)
            self._least[key] = next((level for level, least in bytes_of_levels if least <= self._room), None)
        return self._least[key]

    def fitting(self, way: Job) -> tuple[Job, Memory] | None:
        """Return `fitting` of a job."""
        key = (way.schedule, way.recompute, way.zero, way.layout.vp, _without_order(way))
        if key not in self._fitting:
            self._fitting[key] = fitting(way, self._room, self._fixed)
        found = self._fitting[key]
        return found and (found[0].but(layout=way.layout), found[1])


def _without_order(job: Job) -> Hashable:
    return degrees(job), job.micro_batch, job.sequence_parallel
