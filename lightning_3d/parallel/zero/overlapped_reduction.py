"""Gradients that are reduced while the backward of each micro-batch still runs, so that a rank
keeps only its part of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.zero.early_replica_sums import EarlyReplicaSums
from lightning_3d.parallel.zero.gradient_buffers import Slot, sum_dtype


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


@dataclass(eq=False)
class _Bucket:
    """Neighbouring slots that are sent together, and those of their gradients of this micro-batch
    that are still missing."""

    slots: list[Slot]
    missing: set[int] = field(default_factory=set)
    # rank, start, stop: the part that each rank keeps
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    # index of a share of this rank, start, stop
    own: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.slots[0].start

    @property
    def stop(self) -> int:
        return self.slots[-1].stop

    def expect_all(self) -> None:
        self.missing = {id(slot.parameter) for slot in self.slots}


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A bucket that is under way.

    Attributes:
        works: its messages in the shard group.
        is_last: no other micro-batch adds to these gradients.
    """

    bucket: _Bucket
    buffer: Tensor
    works: list[Any]
    is_last: bool = False

    def own_parts(self) -> list[Tensor]:
        """This rank's parts of the buffer."""
        return [
            self.buffer[start - self.bucket.start : stop - self.bucket.start]
            for _, start, stop in self.bucket.own
        ]


class EagerReduction:
    """Sums of gradients over micro-batches and data-parallel ranks, of which this rank keeps its
    shares.

    A bucket is sent as soon as the backward of a micro-batch has made all its gradients, and its
    `.grad` are freed then. All ranks must send in one order: that in which a backward finishes the
    buckets, from the end of the model. What a micro-batch has no gradient for is sent as zeros when
    its action ends (`flush`), which is also where gradients are taken that came without autograd
    hooks, as in the split backward of zero-bubble schedules. So all ranks of the group must run the
    same actions.

    With `replicas`, `group` is a part of the ranks whose gradients belong together. This rank's
    part of each bucket is then summed over its replicas too, once in each step, bucket by bucket:
    as soon as its sum over `group` is complete in the last backward of its stage.

    Args:
        stages: for each pipeline stage on this rank the slots of its parameters in the flat buffer,
            in the order in which the forward uses them.
        shares: parts of the flat buffer that each rank keeps; those of this rank in the order of
            its partitions.
        group: ranks over which gradients are summed.
        owners: ranks that share out the sums, by whose places in this group the shares are
            numbered; the same as `group`, or neighbours in it.
        control: a group of all data-parallel ranks for tensors in host memory.
        bucket_bytes: upper bound of the bytes of one bucket, except for a single larger parameter.
        alone: parameters that each need a bucket of their own (see `FlatGradients`).
        to_owners: send each element only to the rank that keeps it (`reduce`) instead of to all
            (`all_reduce`); `owners` is `group` then.
        at_once: listen to autograd; otherwise buckets are sent by `finished` and `flush`.
        replicas: further sums of this rank's parts.
    """

    _IN_FLIGHT = 2
    """Most buckets in flight, where a rank must not hold more gradients than that."""

    def __init__(
        self,
        stages: Sequence[Sequence[Slot]],
        shares: Sequence[Share],
        group: dist.ProcessGroup,
        owners: dist.ProcessGroup,
        control: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        alone: Iterable[nn.Parameter] = (),
        to_owners: bool = False,
        at_once: bool = True,
        replicas: EarlyReplicaSums | None = None,
    ) -> None:
        self._group, self._control, self._replicas = group, control, replicas
        self._own = [share for share in shares if share.rank == dist.get_rank(owners)]
        self._to_owners = to_owners
        self._parameters = [slot.parameter for slots in stages for slot in slots]
        first = self._parameters[0]
        self._dtype, self._device = sum_dtype(first), first.device
        apart = {id(parameter) for parameter in alone}
        limit = max(1, bucket_bytes // self._dtype.itemsize)
        self._buckets = [_in_backward_order(slots, limit, apart) for slots in stages]
        for bucket in (bucket for buckets in self._buckets for bucket in buckets):
            bucket.pieces = _pieces(bucket, shares)
            bucket.own = self._overlaps(bucket.start, bucket.stop)
        self._place = {
            id(slot.parameter): (stage, bucket, slot)
            for stage, buckets in enumerate(self._buckets)
            for bucket in buckets
            for slot in bucket.slots
        }
        self._queues: list[deque[_Bucket]] = []
        self._pending: deque[_InFlight] = deque()
        self._last: set[int] = set()  # stages whose last backward has begun
        # buckets whose sums over the replicas have been started
        self._crossed: set[_Bucket] = set()
        self._make_sums: Callable[[], Sequence[Tensor]] = list
        self._made: list[Tensor] | None = None
        self._active = self._once = False
        self._most = self._IN_FLIGHT
        self._seen: set[int] = set()
        self._take: Callable[[nn.Parameter], Tensor | None] = _take_grad
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._arrived) for p in self._parameters if at_once
        ]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._place

    @property
    def _sums(self) -> list[Tensor]:
        if self._made is None:
            self._made = list(self._make_sums())
        return self._made

    def begin(
        self,
        make_sums: Callable[[], Sequence[Tensor]],
        take: Callable[[nn.Parameter], Tensor | None] | None = None,
    ) -> None:
        """Forget all gradients.

        Args:
            make_sums: function that makes, for each share of this rank, zeros that gradients are
                added to. Called when the first bucket is received.
            take: a parameter -> its gradient of the whole step, which is removed. By default what a
                micro-batch left in `.grad`.
        """
        self._active = True
        # Gradients of the whole step are only moved, so that any number in flight takes no extra
        # memory; waiting for other ranks would stall the stages that still compute.
        self._once = take is not None
        self._most = len(self._parameters) if self._once else self._IN_FLIGHT
        self._make_sums, self._made, self._take = make_sums, None, take or _take_grad
        self._pending.clear()
        self._seen.clear()
        self._last.clear()
        self._crossed.clear()
        if self._replicas is not None:
            self._replicas.begin()
        self._queues = [self._expect(stage) for stage in range(len(self._buckets))]
        for parameter in self._parameters:
            parameter.grad = None

    def _expect(self, stage: int) -> deque[_Bucket]:
        for bucket in self._buckets[stage]:
            bucket.expect_all()
        return deque(self._buckets[stage])

    def before_last_backward(self, stage: int) -> None:
        """Called when the last backward of a stage begins: no other micro-batch adds to the
        gradients that are sent from now on."""
        self._last.add(stage)

    def _arrived(self, parameter: Tensor) -> None:
        """Autograd has finished the gradient of a parameter for this micro-batch."""
        if not self._active:
            return  # a backward outside a training step: no other rank runs it
        stage, bucket, _ = self._place[id(parameter)]
        bucket.missing.discard(id(parameter))
        queue = self._queues[stage]
        while queue and not queue[0].missing:
            self._send(queue.popleft())

    @torch.no_grad()
    def finished(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called when the backward of a micro-batch has passed these parameters, on all ranks of
        the group at the same point."""
        for parameter in parameters:
            if id(parameter) in self._place:
                self._arrived(parameter)

    @torch.no_grad()
    def flush(self, parameters: Iterable[nn.Parameter]) -> None:
        """Called when the backward of a micro-batch through the stages of `parameters` is over:
        send the rest of them."""
        for stage in sorted({self._place[id(p)][0] for p in parameters if id(p) in self._place}):
            while self._queues[stage]:
                self._send(self._queues[stage].popleft())
            self._queues[stage] = self._expect(stage)

    def _send(self, bucket: _Bucket) -> None:
        buffer = torch.empty(bucket.stop - bucket.start, dtype=self._dtype, device=self._device)
        for slot in bucket.slots:
            target = buffer[slot.start - bucket.start : slot.stop - bucket.start]
            gradient = self._take(slot.parameter)
            if gradient is None:
                target.zero_()
            else:
                target.copy_(gradient.detach().reshape(-1))
                self._seen.add(id(slot.parameter))
        stage = self._place[id(bucket.slots[0].parameter)][0]
        sent = _InFlight(
            bucket, buffer, self._reduce(bucket, buffer), is_last=self._once or stage in self._last
        )
        self._pending.append(sent)
        if self._once and self._replicas is not None:
            self._crossed.add(bucket)
            self._replicas.start_after(sent.works, sent.own_parts())
        while len(self._pending) > self._most:
            self._receive()

    def _reduce(self, bucket: _Bucket, buffer: Tensor) -> list[Any]:
        if dist.get_world_size(self._group) == 1:
            return []
        if not self._to_owners:
            return [exchange.start_all_reduce(buffer, self._group)]
        works = []
        for rank, start, stop in bucket.pieces:
            owner = dist.get_global_rank(self._group, rank)
            works.append(
                exchange.start_reduce(
                    buffer[start - bucket.start : stop - bucket.start], owner, self._group
                )
            )
        return works

    def _receive(self) -> None:
        """Wait for the oldest bucket and add this rank's part of it."""
        received = self._pending.popleft()
        for work in received.works:
            work.wait()
        for total, part in zip(self._totals(received.bucket), received.own_parts(), strict=True):
            total += part
        if received.is_last:
            self._cross(received.bucket)

    def _totals(self, bucket: _Bucket) -> list[Tensor]:
        """This rank's parts of a bucket in its sums."""
        return [
            self._sums[index][start - self._own[index].start : stop - self._own[index].start]
            for index, start, stop in bucket.own
        ]

    def _cross(self, bucket: _Bucket) -> None:
        """Start to sum this rank's part of a bucket over its replicas, unless that has been
        done."""
        if self._replicas is not None and bucket not in self._crossed:
            self._crossed.add(bucket)
            self._replicas.start(self._totals(bucket))

    def _overlaps(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(index of a share of this rank, start, stop) of what it keeps of [start, stop)."""
        found = [(index, *share.overlap(start, stop)) for index, share in enumerate(self._own)]
        return [(index, first, last) for index, first, last in found if first < last]

    def finish(
        self, scale: float | Tensor, rest_of: Callable[[nn.Parameter], Tensor | None]
    ) -> list[nn.Parameter]:
        """Wait for the buckets in flight and for the replicas, and multiply the sums by `scale`.
        One small all-reduce.

        Args:
            rest_of: a parameter -> gradient that came after its bucket was sent, which is removed:
                a parameter that is used in several segments of a reentrant checkpoint gets several
                in one backward.

        Returns:
            The parameters that no rank had a gradient for.
        """
        self._receive_all()
        rest = {id(p): gradient for p in self._parameters if (gradient := rest_of(p)) is not None}
        known = [float(id(p) in self._seen) for p in self._parameters] + [
            float(id(p) in rest) for p in self._parameters
        ]
        counts = torch.tensor(known)
        if dist.get_world_size(self._control) > 1:
            dist.all_reduce(counts, group=self._control)
        seen, late = counts.view(2, -1).tolist()
        for parameter, count in zip(self._parameters, late, strict=True):
            if count > 0:
                self._add_late(parameter, rest.get(id(parameter)))
        absent = [
            p
            for p, early, more in zip(self._parameters, seen, late, strict=True)
            if early == more == 0
        ]
        for total in self._sums:
            total.mul_(scale)
        self._active, self._make_sums, self._made, self._take = False, list, None, _take_grad
        return absent

    def _receive_all(self) -> None:
        """Wait for the buckets in flight, and for the sums of all buckets over the replicas."""
        if self._once and self._replicas is not None:
            self._replicas.finish()  # before the parts are added to the sums
        while self._pending:
            self._receive()
        if self._replicas is not None:
            for bucket in (bucket for buckets in self._buckets for bucket in buckets):
                self._cross(bucket)  # of stages whose last backward nobody announced
            self._replicas.finish()

    def _add_late(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        bucket = self._alone(parameter)
        buffer = torch.zeros(bucket.stop - bucket.start, dtype=self._dtype, device=self._device)
        if gradient is not None:
            buffer.copy_(gradient.detach().reshape(-1))
        late = _InFlight(bucket, buffer, [exchange.start_all_reduce(buffer, self._group)])
        if self._replicas is not None:
            self._replicas.start_after(late.works, late.own_parts())
            self._replicas.finish()
        self._pending.append(late)
        self._receive()

    def _alone(self, parameter: nn.Parameter) -> _Bucket:
        """A parameter as a bucket of its own."""
        slot = self._place[id(parameter)][2]
        return _Bucket([slot], own=self._overlaps(slot.start, slot.stop))

    def in_flight(self) -> list[Tensor]:
        """Buckets that are on their way."""
        return [bucket.buffer for bucket in self._pending]

    def local(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a parameter's gradient so far, flattened; the same pieces on ranks
        with the same buffer."""
        while self._pending:
            self._receive()
        if self._replicas is not None:
            self._replicas.finish()
        pieces = self._totals(self._alone(parameter))
        return (
            torch.cat(pieces) if pieces else torch.zeros(0, dtype=self._dtype, device=self._device)
        )

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._parameters, self._place, self._buckets = [], [], {}, []
        self._pending.clear()
        self._make_sums, self._made, self._queues = list, None, []


def _take_grad(parameter: nn.Parameter) -> Tensor | None:
    gradient = parameter.grad
    parameter.grad = None
    return gradient


def _pieces(bucket: _Bucket, shares: Sequence[Share]) -> list[tuple[int, int, int]]:
    """(rank, start, stop) of what each rank keeps of a bucket, rising, neighbouring shares of one
    rank as one."""
    pieces: list[tuple[int, int, int]] = []
    for share in sorted(shares, key=lambda share: share.start):
        start, stop = share.overlap(bucket.start, bucket.stop)
        if start >= stop:
            continue
        if pieces and pieces[-1][0] == share.rank and pieces[-1][2] == start:
            pieces[-1] = (share.rank, pieces[-1][1], stop)
        else:
            pieces.append((share.rank, start, stop))
    return pieces


def _in_backward_order(slots: Sequence[Slot], limit: int, alone: set[int]) -> list[_Bucket]:
    """Neighbours in the flat buffer together, up to `limit` elements; the bucket that a backward
    finishes first comes first."""
    used = {id(slot.parameter): index for index, slot in enumerate(slots)}
    buckets: list[_Bucket] = []
    for slot in sorted(slots, key=lambda slot: slot.start):
        last = buckets[-1] if buckets else None
        if (
            last is None
            or slot.start != last.stop
            or slot.stop - last.start > limit
            or alone & {id(slot.parameter), id(last.slots[-1].parameter)}
        ):
            buckets.append(_Bucket([]))
        buckets[-1].slots.append(slot)
    return sorted(
        buckets,
        key=lambda bucket: min(used[id(slot.parameter)] for slot in bucket.slots),
        reverse=True,
    )
