"""Collectives and messages of ranks on CPU, which gloo connects.

Ranks of one host use shared memory (`host_channel`), once `Mesh.warm_up` has connected them. Others
exchange sums and gathers between all pairs of ranks: gloo's own collectives pass messages round a
ring, in n - 1 steps over n ranks or twice as many, and every step wakes threads in both neighbours.
For the messages of a training step on CPU that is most of the time. So every rank sends to all
others at once, and adds up what it receives itself, in the order of the ranks: all ranks get the
same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import (
    P2POp,
    ReduceOp,
    all_to_all_single,
    get_backend,
    get_rank,
    get_world_size,
)

from lightning_3d.compat.torch_fake import FAKE_GLOO
from lightning_3d.parallel.host_channel import MOST_READ, HostChannel, channel_of
from lightning_3d.tracing.messages import at_once, under_way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

# bytes that a rank sends for the sum of a tensor; over more than two ranks a ring sends fewer
SMALL = 2**20

# The functions below have the names of torch's, and are counted in tests in their place.
_all_reduce, _reduce, _broadcast, _isend, _irecv = (
    dist.all_reduce,
    dist.reduce,
    dist.broadcast,
    dist.isend,
    dist.irecv,
)
_all_gather, _reduce_scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor


def uses_gloo(group: ProcessGroup | None) -> bool:
    """True if the ranks communicate through gloo, or a dry run pretends that they do."""
    return get_backend(group) in ("gloo", FAKE_GLOO)


def fits(x: Tensor, group: ProcessGroup | None) -> bool:
    """True if `all_gather` and `reduce_scatter` support this tensor: on CPU, over ranks that use
    gloo."""
    return x.device.type == "cpu" and uses_gloo(group) and get_world_size(group) > 1


def fits_whole(x: Tensor, group: ProcessGroup | None) -> bool:
    """True if `all_reduce` supports it: over shared memory or two ranks, or if the tensor is
    small."""
    if not fits(x, group):
        return False
    return (
        _channel(x, group) is not None
        or get_world_size(group) == 2
        or x.nbytes * (get_world_size(group) - 1) <= SMALL
    )


def _channel(x: Tensor, group: ProcessGroup | None) -> HostChannel | None:
    """Return the channel through which a tensor travels; None where the ranks do not share memory,
    or the tensor is on a GPU."""
    return channel_of(group) if x.device.type == "cpu" else None


def all_reduce(x: Tensor, group: ProcessGroup | None, op: Any = ReduceOp.SUM) -> None:
    """Replace `x`, contiguous, by its sum or maximum over the group."""
    channel = _channel(x, group)
    if channel is not None:
        channel.all_reduce(x, op)
        return
    ranks, flat = get_world_size(group), x.view(-1)
    if ranks == 2:
        sizes = [0 if rank == get_rank(group) else len(flat) for rank in range(ranks)]
        other = torch.empty_like(flat)
        all_to_all_single(other, flat, sizes, sizes, group=group)
        (torch.maximum if op == ReduceOp.MAX else torch.add)(flat, other, out=flat)
        return
    received = flat.new_empty((ranks, len(flat)))
    all_to_all_single(received, flat.expand(ranks, -1).contiguous(), group=group)
    if op == ReduceOp.MAX:
        torch.amax(received, 0, out=flat)
    else:
        torch.sum(received, 0, dtype=flat.dtype, out=flat)


def all_gather(whole: Tensor, part: Tensor, group: ProcessGroup | None) -> Work:
    """Start to gather the parts of all ranks in `whole`. Returns the work to wait for."""
    channel = _channel(part, group)
    if channel is not None:
        return channel.all_gather(whole, part)  # type: ignore[return-value]
    copies = part.view(1, -1).expand(get_world_size(group), -1).contiguous()
    return _Sent(
        all_to_all_single(whole.view(copies.shape), copies, group=group, async_op=True), copies
    )  # type: ignore[return-value]


def reduce_scatter(part: Tensor, whole: Tensor, group: ProcessGroup | None) -> Work:
    """Start to sum `whole` over the ranks and to give each rank its part. Returns the work to wait
    for."""
    channel = _channel(part, group)
    if channel is not None:
        return channel.reduce_scatter(part, whole)  # type: ignore[return-value]
    received = torch.empty_like(whole).view(get_world_size(group), -1)
    work = all_to_all_single(received, whole.view(received.shape), group=group, async_op=True)
    return _Sum(work, received, part)  # type: ignore[return-value]


@at_once("all-reduce", "x")
def sum_now(x: Tensor, group: ProcessGroup | None) -> None:
    """Replace `x`, contiguous, on any device, by its sum over the group."""
    channel = _channel(x, group)
    if channel is not None:
        channel.all_reduce(x)
    else:
        _all_reduce(x, group=group)


@at_once("all-gather", "part")
def gather_now(whole: Tensor, part: Tensor, group: ProcessGroup | None) -> None:
    """Gather the parts of all ranks, on any device, in `whole`."""
    channel = _channel(part, group)
    if channel is not None:
        channel.all_gather(whole, part).wait()
    else:
        _all_gather(whole, part, group=group)


@at_once("reduce-scatter", "whole")
def scatter_sum_now(part: Tensor, whole: Tensor, group: ProcessGroup | None) -> None:
    """Sum `whole`, on any device, over the ranks and give each rank its part."""
    channel = _channel(part, group)
    if channel is not None:
        channel.reduce_scatter(part, whole).wait()
    else:
        _reduce_scatter(part, whole, group=group)


@under_way("all-reduce", "x")
def start_all_reduce(x: Tensor, group: ProcessGroup | None) -> Work:
    """Start to replace `x`, contiguous, on any device, by its sum over the group. Returns the work
    to wait for."""
    channel = _channel(x, group)
    if channel is not None and channel.size <= MOST_READ:
        return channel.start_all_reduce(x)  # type: ignore[return-value]
    return _all_reduce(x, group=group, async_op=True)


@under_way("reduce", "x")
def start_reduce(x: Tensor, owner: int, group: ProcessGroup | None) -> Work:
    """Start to replace `x` on the global rank `owner` by its sum over the group. Elsewhere it is
    undefined then."""
    channel = _channel(x, group)
    if channel is not None:
        return channel.reduce(x, owner)  # type: ignore[return-value]
    return _reduce(x, owner, group=group, async_op=True)


@under_way("broadcast", "x")
def start_broadcast(x: Tensor, source: int, group: ProcessGroup | None) -> Work:
    """Start to replace `x` by that of the global rank `source`."""
    channel = _channel(x, group)
    if channel is not None:
        return channel.broadcast(x, source)  # type: ignore[return-value]
    return _broadcast(x, source, group=group, async_op=True)


@under_way("all-to-all", "x")
def start_all_to_all(
    received: Tensor,
    x: Tensor,
    received_rows: Sequence[int] | None,
    sent_rows: Sequence[int] | None,
    group: ProcessGroup | None,
) -> Work:
    """Start to exchange rows between all ranks of the group; None: equally many."""
    channel = _channel(received, group)
    if channel is not None:
        return channel.all_to_all(received, x, received_rows, sent_rows)  # type: ignore[return-value]
    return all_to_all_single(received, x, received_rows, sent_rows, group=group, async_op=True)


@at_once("all-to-all", "x")
def all_to_all(
    received: Tensor,
    x: Tensor,
    received_rows: Sequence[int] | None,
    sent_rows: Sequence[int] | None,
    group: ProcessGroup | None,
) -> None:
    """Exchange rows between all ranks of the group; None: equally many."""
    channel = _channel(received, group)
    if channel is not None:
        channel.all_to_all(received, x, received_rows, sent_rows).wait()
    else:
        all_to_all_single(received, x, received_rows, sent_rows, group=group)


@under_way("send", "x")
def isend(x: Tensor, receiver: int, group: ProcessGroup | None, tag: int = 0) -> Work:
    """Start to send `x`, contiguous, to a global rank. Returns the work to wait for before `x`
    changes."""
    channel = _channel(x, group)
    if channel is not None:
        return channel.send(x, receiver, tag)  # type: ignore[return-value]
    return _isend(x, receiver, group=group, tag=tag)  # type: ignore[return-value]


@under_way("receive", "x")
def irecv(x: Tensor, sender: int, group: ProcessGroup | None, tag: int = 0) -> Work:
    """Start to receive `x`, contiguous, from a global rank."""
    channel = _channel(x, group)
    if channel is not None:
        return channel.receive(x, sender, tag)  # type: ignore[return-value]
    return _irecv(x, sender, group=group, tag=tag)  # type: ignore[return-value]


def send_and_receive(
    x: Tensor, receiver: int, arriving: Tensor, sender: int, group: ProcessGroup, tag: int = 0
) -> list[Work]:
    """Start to send `x` to a global rank and to receive `arriving` from another, at once. Returns
    the works to wait for."""
    if _channel(x, group) is not None:
        return [isend(x, receiver, group, tag), irecv(arriving, sender, group, tag)]
    return [_together(x, receiver, arriving, sender, group, tag)]  # type: ignore[list-item]


@under_way("send and receive", "x")
def _together(
    x: Tensor, receiver: int, arriving: Tensor, sender: int, group: ProcessGroup, tag: int
) -> _All:
    return _All(
        dist.batch_isend_irecv(
            [P2POp(_isend, x, receiver, group, tag), P2POp(_irecv, arriving, sender, group, tag)]
        )
    )


class _All:
    """Several works that are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def finished() -> Work:
    """Return a work that is done: a rank alone sends nothing."""
    return _All(())  # type: ignore[return-value]


class _Sent:
    """Work that keeps its tensors alive while they are sent."""

    def __init__(self, work: Work, sent: Tensor) -> None:
        self._work, self._sent = work, sent

    def wait(self) -> None:
        self._work.wait()

    def get_future(self) -> Any:
        return self._work.get_future()


class _Sum:
    """Work that is done when the received rows are added up."""

    def __init__(self, work: Work, received: Tensor, part: Tensor) -> None:
        self._work, self._received, self._part = work, received, part

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._received, 0, dtype=self._part.dtype, out=self._part.view(-1))

    def get_future(self) -> Any:
        """The arrival of the rows, which `wait` then adds up."""
        return self._work.get_future()
