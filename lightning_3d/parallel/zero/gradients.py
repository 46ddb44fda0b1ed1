"""Gradients of one rank: their sums over the micro-batches of a step, their places in flat buffers,
and their norm.

The norm of the whole model's gradient is the same number in every layout and on every rank. Every
element counts once: a shard that several tensor-parallel ranks hold, and a copy that is tied across
pipeline stages, count on one of them (`ShardSpec.counts_in_norm`). Squares are added in float64, so
that the number does not depend on how the model is sharded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.collectives import all_reduce_flat

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types too coarse to add many micro-batches in: their gradients are summed in float32."""


def sum_dtype(parameter: Tensor) -> torch.dtype:
    """The type in which gradients of `parameter` are summed and reduced."""
    return torch.float32 if parameter.dtype in LOW_PRECISION else parameter.dtype


class GradientSums:
    """The local gradients of some parameters, None where nothing has arrived since `clear`.

    Parameters of 32 and more bits sum in their own `.grad`, as autograd does. For bf16 ones `.grad`
    is only a place to arrive in: `absorb` adds it to a float32 sum and removes it. (Summed in bf16,
    32 micro-batches are off by 6e-3 relative.)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._apart: dict[nn.Parameter, Tensor | None] = {
            parameter: None for parameter in self._parameters if parameter.dtype in LOW_PRECISION
        }

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._apart = dict.fromkeys(self._apart)

    def absorb(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Add what arrived in `.grad` of bf16 parameters (of all of them by default) to the float32
        sums."""
        if not self._apart:
            return
        for parameter in self._parameters if parameters is None else parameters:
            arrived = parameter.grad
            if arrived is None or parameter not in self._apart:
                continue
            total = self._apart[parameter]
            if total is None:
                self._apart[parameter] = arrived.to(torch.float32)
            else:
                total.add_(arrived)
            parameter.grad = None

    def __getitem__(self, parameter: nn.Parameter) -> Tensor | None:
        return self._apart.get(parameter, parameter.grad)

    def __setitem__(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if parameter in self._apart:
            self._apart[parameter] = gradient
        else:
            parameter.grad = gradient

    def present(self) -> Iterator[Tensor]:
        """All gradients that are there."""
        for parameter in self._parameters:
            gradient = self[parameter]
            if gradient is not None:
                yield gradient


def scale_(gradients: Sequence[Tensor], scale: float | Tensor) -> None:
    """Multiply gradients of one type in place. A tensor must be on their device."""
    if gradients:
        # Of the gradients' type: a product with another one has a kernel for each tensor.
        torch._foreach_mul_(
            list(gradients), scale.to(gradients[0].dtype) if isinstance(scale, Tensor) else scale
        )


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer: elements `start` to `stop`."""

    parameter: nn.Parameter
    start: int
    stop: int


def end_to_end(parameters: Iterable[nn.Parameter]) -> list[Slot]:
    """Slots for parameters one after the other, without gaps."""
    slots, start = [], 0
    for parameter in parameters:
        slots.append(Slot(parameter, start, start + parameter.numel()))
        start += parameter.numel()
    return slots


@dataclass(frozen=True)
class Share:
    """Elements `start` to `stop` of the flat buffer of all gradients, which belong to one rank of
    the shard group."""

    rank: int
    start: int
    stop: int

    def overlap(self, start: int, stop: int) -> tuple[int, int]:
        """The part of [start, stop) in this share; empty if the second number is not above the
        first."""
        return max(self.start, start), min(self.stop, stop)


@dataclass(frozen=True)
class Target:
    """Elements `start` to `stop` of the flat buffer, which this rank steps.

    Attributes:
        total: makes what their sums are added to; None if the sums are kept instead.
        keep: takes the sums, a view of the buffer.
    """

    start: int
    stop: int
    total: Callable[[], Tensor] | None = None
    keep: Callable[[Tensor], None] | None = None


def pieces_by_rank(shares: Sequence[Share], start: int, stop: int) -> list[tuple[int, int, int]]:
    """(rank, start, stop) of what each rank keeps of some elements, rising, neighbouring shares of
    one rank as one."""
    pieces: list[tuple[int, int, int]] = []
    for share in sorted(shares, key=lambda share: share.start):
        first, last = share.overlap(start, stop)
        if first >= last:
            continue
        if pieces and pieces[-1][0] == share.rank and pieces[-1][2] == first:
            pieces[-1] = (share.rank, pieces[-1][1], last)
        else:
            pieces.append((share.rank, first, last))
    return pieces


def gaps(slots: Sequence[Slot], numel: int) -> list[tuple[int, int]]:
    """(start, stop) of the gaps between slots, in rising order, and after the last one."""
    starts = [*(slot.start for slot in slots), numel]
    ends = [0, *(slot.stop for slot in slots)]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


class ReplicaSums:
    """All-reduces over the ranks that have the same shard (HSDP), each started when its sum over
    the shard group is complete.

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
        while self._queue and (self._stream is not None or self._has_arrived(self._queue[0][0])):
            self._start_next()

    @staticmethod
    def _has_arrived(messages: Sequence[Any]) -> bool:
        return all(message.is_completed() for message in messages)

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


EPSILON = 1e-6
"""Added to the norm when clipping, as torch.nn.utils.clip_grad_norm_ does."""

ROW = 16384
"""Elements whose squares are added in the gradients' own type. On a CPU torch adds the squares of a
float32 tensor one after the other: the norm of 10 million elements is off by 4e-4, of rows of this
length, added in float64, by 2e-8, in the same time."""


def squared_norm(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of the squares of all elements: float64, shape ()."""
    norms = [torch.linalg.vector_norm(rows, dim=1) for tensor in tensors for rows in _rows(tensor)]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.cat(norms).to(torch.float64).square().sum()


def _rows(tensor: Tensor) -> Iterator[Tensor]:
    """The elements as a matrix of rows of `ROW` elements, and as one row those that are left."""
    elements = tensor.reshape(-1)
    whole = elements.numel() // ROW * ROW
    if whole:
        yield elements[:whole].view(-1, ROW)
    if whole < elements.numel():
        yield elements[whole:].view(1, -1)


def global_norm(
    tensors: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """Euclidean norm of the gradients that the ranks of `group` (None: all) count, float64, shape
    (): one all-reduce of one number."""
    square = squared_norm(tensors, device)
    if dist.get_world_size(group) > 1:
        all_reduce_flat(square, group)
    return square.sqrt()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings gradients of this norm to a norm of at most `max_norm`, on the norm's
    device. The host does not wait.

    A norm that is not a number stays visible: the coefficient is NaN too, as in
    torch.nn.utils.clip_grad_norm_.
    """
    # A division, not `max_norm / tensor`, which torch computes as a product with the reciprocal and
    # so rounds twice.
    return (torch.full_like(norm, max_norm) / (norm + EPSILON)).clamp(max=1.0)
