"""Decides which steps are traced, and combines on rank 0 what the ranks recorded."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.waits import seconds_waited
from lightning_3d.engine.not_ready import BUILT, require
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.parallel.uneven_work import uneven_seconds
from lightning_3d.parallel.zero import DataParallelBackend
from lightning_3d.ranks.heartbeat import Heartbeat
from lightning_3d.tracing.clocks import Round, clock_name, clock_offsets, meet
from lightning_3d.tracing.memory import MemoryWatch
from lightning_3d.tracing.recorder import Recorder
from lightning_3d.tracing.trace import (
    OPTIMIZER,
    Event,
    Memory,
    RankTrace,
    StepTrace,
    Transfer,
    chosen_ranks,
    group_name,
    work_of,
)


class StepTracer:
    """Traces steps of one rank. A step that is not traced costs a comparison for each action.

    At the end of a traced step all ranks send what they recorded to rank 0, which broadcasts the
    result: two collectives over the world, and a few more of one number where ranks are on several
    machines, to compare their clocks.

    Args:
        every: trace every n-th step; None: only steps requested with `trace_next_step`.
        heartbeat: see `Recorder`.

    Raises:
        ConfigError: `every` is not a positive whole number.
    """

    def __init__(self, every: int | None = None, heartbeat: Heartbeat | None = None) -> None:
        if every is not None and (
            not isinstance(every, int) or isinstance(every, bool) or every < 1
        ):
            raise ConfigError(
                "trace_every_n_steps must be a whole number of at least 1, or None to trace no"
                f" step; got {every!r}."
            )
        self.every = every
        self.recorder = Recorder(heartbeat=heartbeat)
        self._module: nn.Module | None = None
        self._device = torch.device("cpu")
        self._layout, self._schedule, self._operations = Layout(), "", True
        self._asked = self._tracing = False
        self._step = 0
        self._watch: MemoryWatch | None = None
        self._clocks: list[str] = []

    def connect(
        self,
        module: nn.Module,
        device: torch.device,
        layout: Layout,
        schedule: str,
        *,
        operations: bool,
    ) -> Recorder:
        """Set what is traced, before the first step. Returns the recorder of times.

        Args:
            operations: see `MemoryWatch`.
        """
        self._module, self._device, self._layout, self._schedule, self._operations = (
            module,
            device,
            layout,
            schedule,
            operations,
        )
        self.recorder = Recorder(
            device, self.recorder.heartbeat, lambda: seconds_waited() + uneven_seconds()
        )
        return self.recorder

    def trace_next_step(self) -> None:
        """Trace the next optimizer step. All ranks call it."""
        self._asked = True

    @contextmanager
    def batch(self, step: int, place: int, backend: DataParallelBackend) -> Iterator[None]:
        """Wrap forward, backward and reduction of a batch.

        Args:
            step: number of the optimizer step, 1 for the first.
            place: index of this batch among those of the step.
            backend: holder of gradients and of the optimizer's state.
        """
        if place == 0:
            self._begin(step, backend)
        self.recorder.batch = place
        with self._recording():
            yield

    @contextmanager
    def optimizer(self) -> Iterator[None]:
        """Wrap a part of the optimizer step, outside `batch`."""
        with self._recording(), self.recorder.span(OPTIMIZER):
            yield

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self.recorder.recording(self._tracing)
        try:
            with self._watch.watching() if self._watch is not None else nullcontext():
                yield
        finally:
            self.recorder.recording(False)

    def _begin(self, step: int, backend: DataParallelBackend) -> None:
        self._tracing = self._asked or (self.every is not None and step % self.every == 0)
        self._asked, self._watch = False, None
        if self._tracing:
            self._step = step
            module = require(self._module, "a model to trace", BUILT)
            held = backend.held()
            weights, others = (
                [*_weights(backend), *held["parameters"]],
                [*held["gradients"], *held["optimizer"]],
            )
            self._watch = MemoryWatch(
                module, self._device, weights, others, operations=self._operations
            )
            self.recorder.begin()

    def before_reduction(self, backend: DataParallelBackend) -> None:
        """Record the memory of gradients when those of the step are complete on this rank, because
        they then need most memory."""
        if self._watch is not None:
            self._watch.note_gradients(backend.held()["gradients"])

    def finish(self, backend: DataParallelBackend) -> StepTrace | None:
        """End the optimizer step. Returns its trace, the same on every rank except for the events,
        which only rank 0 has.

        Collective over the world where the step was traced; returns None otherwise.
        """
        if not self._tracing or self._watch is None:
            return None
        self._tracing, watch, self._watch = False, self._watch, None
        events = tuple(self.recorder.take())
        transfers = tuple(
            each._replace(group=group_name(self._layout, each))
            for each in self.recorder.take_transfers()
        )
        return self._collect(
            events, transfers, watch.measure(_weights(backend), backend.held()["optimizer"])
        )

    def _collect(
        self, events: tuple[Event, ...], transfers: tuple[Transfer, ...], memory: Memory
    ) -> StepTrace:
        rank = dist.get_rank()
        if not self._clocks:
            self._clocks = [""] * dist.get_world_size()
            dist.all_gather_object(self._clocks, clock_name())
        rounds = meet(self._device) if len(set(self._clocks)) > 1 else []
        kept = (events, transfers) if rank in chosen_ranks(self._layout) else (None, None)
        own = (RankTrace(rank, socket.gethostname(), memory, work_of(events), *kept), rounds)
        without_events: list[Any] = [None]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(own, gathered if rank == 0 else None, dst=0)
        trace = self._combine(gathered) if rank == 0 else None
        if trace is not None:
            without_events = [
                replace(
                    trace,
                    ranks=tuple(replace(each, events=None, transfers=None) for each in trace.ranks),
                )
            ]
        dist.broadcast_object_list(without_events, src=0)
        return trace or without_events[0]

    def _combine(self, gathered: list[tuple[RankTrace, list[Round]]]) -> StepTrace:
        offsets = clock_offsets(self._clocks, [rounds for _, rounds in gathered])
        ranks = tuple(
            each.shifted(-offset) for (each, _), (offset, _) in zip(gathered, offsets, strict=True)
        )
        error = max(uncertain for _, uncertain in offsets)
        return StepTrace(
            self._step,
            self._layout.name,
            self._layout.order,
            self._schedule,
            ranks,
            error,
            self._device.type,
        )


def _weights(backend: DataParallelBackend) -> list[Tensor]:
    """Return the tensors of this rank's shards of parameters."""
    return [
        value
        for shard in backend.weight_shards()
        for value in shard.values.values()
        if isinstance(value, Tensor)
    ]
