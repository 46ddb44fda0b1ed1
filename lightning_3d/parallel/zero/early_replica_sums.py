"""Sums over the replicas of a shard (HSDP) that are started while the last backward still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel import gloo_exchange as exchange


class EarlyReplicaSums:
    """All-reduces over the ranks that have the same part, each started as soon as its sum over the
    shard group is complete.

    All replicas start them in one order: that of the calls. On a GPU, a stream of its own waits for
    the messages of the shard group, so that neither the host nor the backward does. With gloo, the
    host looks whether they have arrived whenever a call is made. It must not wait: the message of
    another rank may come only after that rank's backward, which may need this one.

    Args:
        group: one rank of each shard group.
        device: of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: deque[tuple[Sequence[Any], Sequence[Tensor]]] = deque()
        self._started: list[Any] = []

    def begin(self) -> None:
        """Forget everything of the step before, which may have failed."""
        self._queue.clear()
        self._started.clear()

    def start(self, parts: Sequence[Tensor]) -> None:
        """Start to replace tensors, which are complete on the current stream, by their sums."""
        self._started += [exchange.start_all_reduce(part, self._group) for part in parts]

    def start_after(self, messages: Sequence[Any], parts: Sequence[Tensor]) -> None:
        """Start to replace tensors by their sums when the messages that write them have arrived, or
        in a later call.

        Args:
            messages: works of the shard group.
            parts: may be empty.
        """
        self._queue.append((messages, parts))
        while self._queue and (
            self._stream is not None or all(message.is_completed() for message in self._queue[0][0])
        ):
            self._start_next()

    def _start_next(self) -> None:
        messages, parts = self._queue.popleft()
        with torch.cuda.stream(self._stream):
            for message in messages:
                message.wait()
            self.start(parts)

    def finish(self) -> None:
        """Start what has not been started, and wait for everything."""
        while self._queue:
            self._start_next()
        for work in self._started:
            work.wait()
        self._started.clear()
