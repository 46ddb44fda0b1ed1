"""Timing of what a rank does while recording is on, and hooks for listeners."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from lightning_3d.ranks.heartbeat import Heartbeat
from lightning_3d.tracing import messages
from lightning_3d.tracing.marks import Marks
from lightning_3d.tracing.trace import Event, Transfer

_NOTHING: AbstractContextManager[None] = nullcontext()

Listener = Callable[[Any], AbstractContextManager[Any]]
"""Function from an action of a schedule (`pipeline.schedule.Action`) to the context that runs
it."""


class Recorder:
    """Events of one rank, in their order.

    On a GPU an action has ended when the GPU has done it: events are recorded on the current
    stream, where a wait for a message holds up what follows. Nothing waits for them before `take`.

    Args:
        device: where the work is done.
        heartbeat: learns of every action, recorded or not.
        waited: function that returns the seconds for which this process has waited for others, or
            has done work of which others have less.

    Attributes:
        own_seconds: time inside of all actions so far, without what `waited` counts.
        batch: which of the batches of an optimizer step runs, counted from 0.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        heartbeat: Heartbeat | None = None,
        waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._waited = waited
        self.heartbeat = heartbeat or Heartbeat()
        self._marks = Marks(device)
        self._messages = messages.MessageLog(self._marks)
        self._recording = False
        self._open: list[tuple[tuple[str, int | None, int | None, int], Any, Any]] = []
        self.batch = 0
        self.own_seconds = 0.0
        self._listeners: list[Listener] = []

    def listen(self, listener: Listener) -> None:
        """Run every action of a training step, with its messages and its reduction, inside a
        context."""
        self._listeners.append(listener)

    @contextmanager
    def action(self, action: Any) -> Iterator[None]:
        """Return a context for an action of a schedule and everything that belongs to it; `span`
        times the parts."""
        start = time.perf_counter() - self._waited()
        with ExitStack() as stack:
            for listener in self._listeners:
                stack.enter_context(listener(action))
            yield
        self.own_seconds += time.perf_counter() - self._waited() - start

    def begin(self) -> None:
        """Discard all events and messages."""
        self._open = []
        self._messages.discard()
        self._marks.begin()

    def recording(self, on: bool) -> None:
        """Start or stop recording events, and the messages that start meanwhile."""
        self._recording = on
        messages.follow(self._messages if on else None)

    def span(
        self, kind: str, stage: int | None = None, micro_batch: int | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context that times its body."""
        self.heartbeat.act(kind, stage, micro_batch)
        return _Span(self, kind, stage, micro_batch) if self._recording else _NOTHING

    def take(self) -> list[Event]:
        """Return the events since `begin`, in seconds of this machine's `perf_counter`. On a GPU
        this waits for the work to end."""
        if self._open:
            self._marks.settle()
        taken, self._open = self._open, []
        return [
            Event(*what, self._marks.seconds(start), self._marks.seconds(end))
            for what, start, end in taken
        ]

    def take_transfers(self) -> list[Transfer]:
        """Return the messages since `begin` that have arrived, after `take`."""
        return self._messages.take()


class _Span:
    """One event, from entry to exit. Dropped if the block raises."""

    def __init__(
        self, recorder: Recorder, kind: str, stage: int | None, micro_batch: int | None
    ) -> None:
        self._recorder, self._what = recorder, (kind, stage, micro_batch)

    def __enter__(self) -> None:
        self._start = self._recorder._marks.mark()

    def __exit__(self, kind: object, error: object, stack: object) -> None:
        if error is None:
            self._recorder._open.append(
                ((*self._what, self._recorder.batch), self._start, self._recorder._marks.mark())
            )
