"""Collectives and messages of a process group whose ranks are on one host, through shared memory;
see `host_memory`.

Every rank writes what others need once, and reads and adds up what it needs itself, in the order of
the ranks: all get the same bits. Nothing runs beside the computation, since the ranks of a CPU
share its cores with whatever would. So `wait` does the reading.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_3d.compat.flight_recorder import SharedMemoryCall, shared_memory_calls
from lightning_3d.parallel.host_memory import Arrived, Neighbours, connect

_LARGE = 1 << 16
"""Bytes of a tensor from which more than two ranks sum it in two steps: each sums a part of it, and
all gather the parts."""
_NARROW = (torch.bfloat16, torch.float16)
MOST_READ = 4
"""Ranks up to which each reads the whole tensors of all others, where they do not wait for each
other. A ring moves less for more ranks."""


class Arrival:
    """What is waited for: a `Work` of torch, of which the engine uses two methods.

    Args:
        call: record of it.
        finish: function that reads what arrives; None: nothing does.
    """

    def __init__(self, call: SharedMemoryCall, finish: Callable[[], None] | None) -> None:
        self._call, self._finish = call, finish
        call.done = finish is None

    def wait(self) -> bool:
        """Read what has arrived, waiting for it."""
        if self._finish is not None:
            self._finish()
            self._finish, self._call.done = None, True
        return True

    def is_completed(self) -> bool:
        """True if there is nothing to wait for."""
        return self._finish is None


class HostChannel:
    """Messages between the ranks of a group. All ranks of the group call its collectives in the
    same order.

    Args:
        neighbours: connections to the other ranks.
        group: the group.
    """

    def __init__(self, neighbours: Neighbours, group: dist.ProcessGroup) -> None:
        self._neighbours = neighbours
        self._group, self._purpose = group.group_name, group.group_desc
        self._ranks = dist.get_process_group_ranks(group)
        self._me = self._ranks.index(neighbours.rank)
        self._others = [rank for rank in self._ranks if rank != neighbours.rank]
        self._sent: dict[int, int] = {}  # messages so far, by the number of their channel
        self._tag = _tag(f"{self._group} {self._ranks}")
        self._begun = {False: 0, True: 0}  # collectives and messages

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._ranks)

    def all_reduce(self, x: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Replace `x`, contiguous, by its sum or maximum. All ranks of the group wait for each
        other here."""
        if len(self._ranks) == 2 or x.nbytes < _LARGE:
            self.start_all_reduce(x, op).wait()
        else:
            Arrival(self._begin("all_reduce", x), self._in_two_steps(x.view(-1), op)).wait()

    def start_all_reduce(self, x: Tensor, op: Any = ReduceOp.SUM) -> Arrival:
        """Start to replace `x`, contiguous, by its sum or maximum."""
        call, key, flat = self._begin("all_reduce", x), self._key(), x.view(-1)
        self._neighbours.post(self._others, key, flat)

        def finish() -> None:
            self._combine(key, flat.nbytes, flat, slice(None), op)

        return Arrival(call, finish)

    def _in_two_steps(self, flat: Tensor, op: Any) -> Callable[[], None]:
        first, second = self._key(), self._key()
        parts = _ranges(
            [
                len(flat) // len(self._ranks) + (index < len(flat) % len(self._ranks))
                for index in range(len(self._ranks))
            ]
        )
        self._neighbours.post(self._others, first, flat)

        def finish() -> None:
            own = flat[parts[self._me]]
            self._combine(first, flat.nbytes, own, parts[self._me], op)
            self._neighbours.post(self._others, second, own)
            for rank, part in zip(self._ranks, parts, strict=True):
                if rank != self._neighbours.rank:
                    self._read(rank, second, flat[part])

        return finish

    def reduce(self, x: Tensor, owner: int) -> Arrival:
        """Replace `x` on the rank `owner` by its sum over all."""
        call, key, flat = self._begin("reduce", x), self._key(), x.view(-1)
        if owner != self._neighbours.rank:
            self._neighbours.post([owner], key, flat)
            return Arrival(call, None)

        def finish() -> None:
            self._combine(key, flat.nbytes, flat, slice(None), ReduceOp.SUM)

        return Arrival(call, finish)

    def reduce_scatter(self, part: Tensor, whole: Tensor) -> Arrival:
        """Sum `whole` over the ranks and give each rank its part."""
        call, key, flat = self._begin("reduce_scatter", whole), self._key(), whole.view(-1)
        own = slice(self._me * part.numel(), (self._me + 1) * part.numel())
        self._neighbours.post(self._others, key, flat)

        def finish() -> None:
            target = part.view(-1)
            target.copy_(flat[own])
            self._combine(key, flat.nbytes, target, own, ReduceOp.SUM)

        return Arrival(call, finish)

    def all_gather(self, whole: Tensor, part: Tensor) -> Arrival:
        """Gather the parts of all ranks in `whole`."""
        call, key, rows = (
            self._begin("all_gather", part),
            self._key(),
            whole.view(len(self._ranks), -1),
        )
        self._neighbours.post(self._others, key, part)
        rows[self._me].copy_(part.reshape(-1))

        def finish() -> None:
            for index, rank in enumerate(self._ranks):
                if index != self._me:
                    self._read(rank, key, rows[index])

        return Arrival(call, finish)

    def broadcast(self, x: Tensor, source: int) -> Arrival:
        """Replace `x` by that of the rank `source`."""
        call, key, flat = self._begin("broadcast", x), self._key(), x.view(-1)
        if source == self._neighbours.rank:
            self._neighbours.post(self._others, key, flat)
            return Arrival(call, None)
        return Arrival(call, lambda: self._read(source, key, flat))

    def all_to_all(
        self,
        received: Tensor,
        x: Tensor,
        received_rows: Sequence[int] | None,
        sent_rows: Sequence[int] | None,
    ) -> Arrival:
        """Send rows of `x` to each rank, and receive rows of each; None: equally many."""
        call, key = self._begin("all_to_all", x), self._key()
        arriving, leaving = self._parts(received, received_rows), self._parts(x, sent_rows)
        for index, rank in enumerate(self._ranks):
            if index != self._me:
                self._neighbours.post([rank], key, x[leaving[index]])
        received[arriving[self._me]].copy_(x[leaving[self._me]])

        def finish() -> None:
            for index, rank in enumerate(self._ranks):
                if index != self._me:
                    self._read(rank, key, received[arriving[index]].view(-1))

        return Arrival(call, finish)

    def _parts(self, rows: Tensor, counts: Sequence[int] | None) -> list[slice]:
        return _ranges(counts or [len(rows) // len(self._ranks)] * len(self._ranks))

    def send(self, x: Tensor, receiver: int, tag: int = 0) -> Arrival:
        """Send to one rank. `x`, contiguous, may change at once."""
        call = self._begin("send", x, message=True)
        self._neighbours.post([receiver], self._between(self._neighbours.rank, receiver, tag), x)
        return Arrival(call, None)

    def receive(self, x: Tensor, sender: int, tag: int = 0) -> Arrival:
        """Receive from one rank."""
        call, key, flat = (
            self._begin("recv", x, message=True),
            self._between(sender, self._neighbours.rank, tag),
            x.view(-1),
        )
        return Arrival(call, lambda: self._read(sender, key, flat))

    def _begin(self, kind: str, x: Tensor, *, message: bool = False) -> SharedMemoryCall:
        self._begun[message] += 1
        call = SharedMemoryCall(
            self._group, self._purpose, self._begun[message], kind, tuple(x.shape), x.dtype, message
        )
        shared_memory_calls.append(call)
        return call

    def _key(self) -> tuple[int, int]:
        return self._next(self._tag)

    def _between(self, sender: int, receiver: int, tag: int) -> tuple[int, int]:
        return self._next(self._tag ^ (1 + sender << 40 | receiver << 20 | tag))

    def _next(self, channel: int) -> tuple[int, int]:
        number = self._sent.get(channel, 0)
        self._sent[channel] = number + 1
        return channel, number

    def _read(self, rank: int, key: tuple[int, int], target: Tensor) -> None:
        arrived = self._take(rank, key, target.nbytes)
        target.copy_(arrived.content.view(target.dtype))
        arrived.release()

    def _take(self, rank: int, key: tuple[int, int], size: int) -> Arrived:
        """Wait for a message of `size` bytes. Other sizes would be cut, or stretched, in
        silence."""
        arrived = self._neighbours.take(rank, key)
        if len(arrived.content) != size:
            raise RuntimeError(
                f"Rank {rank} sent {len(arrived.content)} bytes where this rank expects {size}"
                f" (group {self._purpose or self._group}): the ranks do not call the same"
                " collectives with tensors of the same size and type."
            )
        return arrived

    def _combine(self, key: tuple[int, int], size: int, own: Tensor, part: slice, op: Any) -> None:
        """Sum a part of what all ranks have sent, `size` bytes each, in the order of the ranks, in
        `own`, which is this rank's."""
        arrived = {rank: self._take(rank, key, size) for rank in self._others}
        terms = [
            arrived[rank].content.view(own.dtype)[part] if rank in arrived else own
            for rank in self._ranks
        ]
        if op == ReduceOp.SUM and own.dtype in _NARROW and len(terms) > 2:  # added up in float32
            torch.sum(torch.stack(terms), 0, dtype=own.dtype, out=own)
        else:
            pair: Any = {
                ReduceOp.SUM: torch.add,
                ReduceOp.MAX: torch.maximum,
                ReduceOp.MIN: torch.minimum,
            }[op]
            total = terms[0]
            for index, term in enumerate(terms[1:], start=1):
                # Until this rank's own term has been added, its memory must not be overwritten.
                total = pair(total, term, out=own) if index >= self._me else pair(total, term)
        for message in arrived.values():
            message.release()


_channels: dict[str, HostChannel] = {}
_neighbours: Neighbours | None = None
_connected: Any = None  # the world for which the ranks were connected


def share(groups: Sequence[dist.ProcessGroup], timeout: timedelta) -> None:
    """Let groups that are on one host communicate through shared memory. All ranks of the world
    call it, each with its groups."""
    global _neighbours, _connected
    world = dist.group.WORLD
    if _connected is not world:
        unshare()
        _neighbours, _connected = (
            connect(dist.get_rank(), dist.get_world_size(), timeout, _gather),
            world,
        )
    if _neighbours is not None:
        for group in groups:
            ranks = dist.get_process_group_ranks(group)
            if len(ranks) > 1 and group.group_name not in _channels and _neighbours.join(ranks):
                _channels[group.group_name] = HostChannel(_neighbours, group)


def unshare(groups: Sequence[dist.ProcessGroup] | None = None) -> None:
    """Forget these groups; None: all groups, and the connections."""
    global _neighbours, _connected
    if groups is not None:
        for group in groups:
            _channels.pop(group.group_name, None)
        return
    _channels.clear()
    if _neighbours is not None:
        _neighbours.close()
    _neighbours, _connected = None, None


def channel_of(group: dist.ProcessGroup | None) -> HostChannel | None:
    """The channel of a group; None for one whose ranks do not share memory."""
    if not _channels or _connected is not dist.group.WORLD:
        return None
    return _channels.get((group or dist.group.WORLD).group_name)


def _let_go() -> None:
    """Close the connections of a child process. Else a rank that has ended would seem to live as
    long as its loaders of data."""
    global _neighbours, _connected
    if _neighbours is not None:
        _neighbours.let_go()
    _channels.clear()
    _neighbours, _connected = None, None


os.register_at_fork(after_in_child=_let_go)


def _gather(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _tag(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _ranges(sizes: Sequence[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
