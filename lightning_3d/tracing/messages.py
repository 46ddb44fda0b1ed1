"""Times of messages between ranks: when each started, when it had arrived, and when this rank
waited for it.

The functions that start messages are decorated with `under_way` or `at_once`
(`parallel.collectives`, `parallel.gloo_exchange`). They cost a comparison while no step is traced.
What torch.compile makes of collectives, DeepSpeed's own messages, and agreements of a few numbers
that call torch.distributed directly are not seen.

When a message has arrived is known
- on NCCL from an event on a stream of its own, which waits for it,
- on gloo from the thread that carries it, except for reduce-scatters and messages between two
  ranks,
- otherwise when this rank has waited for it. In shared memory it reads the message then, but what
  it reads may have been there for long.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from lightning_3d.tracing.marks import Marks
from lightning_3d.tracing.trace import Transfer

P = ParamSpec("P")
R = TypeVar("R")

_followed: MessageLog | None = None


def follow(log: MessageLog | None) -> None:
    """Record the messages that start from now on in a log; None: in none."""
    global _followed
    _followed = log


def under_way(operation: str, tensor: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that starts a message and returns the work to wait for. Its parameter
    `group` is the process group.

    Args:
        operation: name of the message.
        tensor: parameter whose bytes this rank sends; the receiver's, if it only receives.
    """
    return _decorated(operation, tensor, lambda log: log.started)


def at_once(operation: str, tensor: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that returns when its message has arrived; see `under_way`."""
    return _decorated(operation, tensor, lambda log: log.waited)


def _decorated(
    operation: str, tensor: str, way: Callable[[MessageLog], Callable[..., Any]]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if _followed is None:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            if dist.get_world_size(given["group"]) == 1:
                return function(*args, **kwargs)
            result: R = way(_followed)(
                operation, given[tensor], given["group"], lambda: function(*args, **kwargs)
            )
            return result

        return call

    return decorate


@dataclass
class _Note:
    """A message, with marks instead of seconds."""

    operation: str
    group: str
    ranks: tuple[int, ...]
    size: int
    start: Any
    launched: Any = None
    arrived: Any = None
    wait: tuple[Any, Any] | None = None


class MessageLog:
    """Messages of one rank, in the order of their starts.

    Args:
        marks: clock of the device.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._notes: list[_Note] = []
        self._streams: dict[str, Any] = {}

    def started(
        self,
        operation: str,
        x: torch.Tensor,
        group: dist.ProcessGroup | None,
        start: Callable[[], Any],
    ) -> Any:
        """Start a message. Returns the work to wait for."""
        note = self._note(operation, x, group)
        work = start()
        if x.device.type != "cuda":
            note.launched = time.perf_counter()
            self._expect(note, work)
        elif dist.get_backend(group) == dist.Backend.NCCL:
            note.arrived = self._mark_apart(note.group, work)
        return UnderWay(work, note, self.mark, x)

    def waited(
        self,
        operation: str,
        x: torch.Tensor,
        group: dist.ProcessGroup | None,
        run: Callable[[], Any],
    ) -> Any:
        """Run a message to its end."""
        note = self._note(operation, x, group)
        result = run()
        note.arrived = self._marks.mark() if x.device.type == "cuda" else time.perf_counter()
        note.wait = note.start, note.arrived
        return result

    def discard(self) -> None:
        """Forget all messages."""
        self._notes = []

    def take(self) -> list[Transfer]:
        """Return the messages that have arrived, and forget all. On a GPU, `Marks.settle` comes
        first."""
        done = [note for note in self._notes if note.arrived is not None or note.wait is not None]
        self._notes = []
        return [self._transfer(note) for note in done]

    def mark(self, x: torch.Tensor) -> Any:
        """Mark this moment in the main stream; None in another one."""
        if x.device.type != "cuda":
            return time.perf_counter()
        return self._marks.mark() if self._marks.is_in_main_stream() else None

    def _note(self, operation: str, x: torch.Tensor, group: dist.ProcessGroup | None) -> _Note:
        group = group or dist.group.WORLD
        assert group is not None
        start = self._marks.mark() if x.device.type == "cuda" else time.perf_counter()
        ranks = tuple(dist.get_process_group_ranks(group))
        purpose = "world" if group.group_desc == "default_pg" else group.group_desc
        note = _Note(operation, purpose, ranks, x.numel() * x.element_size(), start)
        self._notes.append(note)
        return note

    def _expect(self, note: _Note, work: Any) -> None:
        """Let a message in host memory report when it has arrived, if it can."""

        def arrived(_: Any) -> None:
            note.arrived = time.perf_counter()

        with suppress(AttributeError, RuntimeError):
            work.get_future().add_done_callback(arrived)
            return
        if work.is_completed():
            arrived(None)

    def _mark_apart(self, group: str, work: Any) -> Any:
        """Mark the arrival in a stream that waits for nothing else than messages of this group."""
        stream = self._streams.setdefault(group, torch.cuda.Stream(self._marks.device))
        with torch.cuda.stream(stream):
            work.wait()
            return self._marks.mark()

    def _transfer(self, note: _Note) -> Transfer:
        wait = (
            None
            if note.wait is None
            else (self._marks.seconds(note.wait[0]), self._marks.seconds(note.wait[1]))
        )
        arrived = None if note.arrived is None else self._marks.seconds(note.arrived)
        # A callback may run a moment later than the wait returns.
        end = min(time for time in (arrived, wait and wait[1]) if time is not None)
        start = self._marks.seconds(note.start)
        launched = start if note.launched is None else min(note.launched, end)
        return Transfer(
            note.operation,
            note.group,
            note.ranks,
            note.size,
            start,
            launched,
            end,
            wait,
            arrived is not None,
        )


class UnderWay:
    """Work of a message that is recorded. Keeps the message's tensor until the engine has waited:
    NCCL's own work would have, if nothing else had waited for it before."""

    def __init__(
        self, work: Any, note: _Note, mark: Callable[[torch.Tensor], Any], x: torch.Tensor
    ) -> None:
        self._work, self._note, self._mark, self._x = work, note, mark, x

    def wait(self) -> Any:
        begin = self._mark(self._x)
        result = self._work.wait()
        if begin is not None and self._note.wait is None:
            self._note.wait = begin, self._mark(self._x)
        return result

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed
