"""Sums of gradients over the ranks that share their parameters, in buckets: the one reduction of
all ZeRO stages.

A bucket is a run of neighbours in a flat buffer. It is sent when all its gradients are there, and
all ranks send in one order. `Policy` says when that is (once in a step, or in every micro-batch),
to whom a bucket goes (to all ranks, or to the rank that keeps an element, and then to the replicas
of that rank's shard), and what becomes of it (`.grad`, or a part of a flat gradient).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.collectives import reduce_scatter_flat
from lightning_3d.parallel.zero.gradients import (
    GradientSums,
    ReplicaSums,
    Share,
    Slot,
    Target,
    gaps,
    pieces_by_rank,
    scale_,
    sum_dtype,
)
from lightning_3d.parallel.zero.trained import Wave


@dataclass(frozen=True)
class Policy:
    """When gradients are reduced, to whom they go, and what becomes of them.

    Attributes:
        group: ranks over which gradients are summed.
        bucket_bytes: upper bound of the bytes of one bucket, except for a single larger parameter;
            None for one bucket.
        alone: parameters that have a bucket of their own. How a collective associates its sum
            depends on an element's place in it and on its length; copies on two ranks stay
            bit-equal only when these are the same.
        everyone: all ranks whose gradients belong together, where `group` is only a part of them.
            The counts and what is alone are summed over all of them at once.
        replicas: sums this rank's part over the rest of them; None if `group` is all.
        shares: the rank of `group` that each element is sent to; None: to all.
        scattered: parts (start, stop) that are buckets, each reduce-scattered; the group's size
            divides their length.
        in_one_tensor: buckets lie in one tensor, which exists from the first one on; otherwise each
            has memory of its own, so that one that is sent early takes none for the others.
        into_gradients: the gradients become views of the buffer.
        from_the_end: buckets are sent in the order in which a backward finishes them, and summed
            over the replicas meanwhile; otherwise by their place.
        control: a group of all data-parallel ranks for tensors in host memory. Given, gradients are
            reduced in every micro-batch.
        listens: autograd says which gradients of a micro-batch are there; otherwise `arrived` and
            `flush` do.
    """

    group: dist.ProcessGroup
    bucket_bytes: int | None = None
    alone: Sequence[nn.Parameter] = ()
    everyone: dist.ProcessGroup | None = None
    replicas: ReplicaSums | None = None
    shares: Sequence[Share] | None = None
    scattered: Sequence[tuple[int, int]] | None = None
    in_one_tensor: bool = False
    into_gradients: bool = False
    from_the_end: bool = False
    control: dist.ProcessGroup | None = None
    listens: bool = False


@dataclass(eq=False)
class _Bucket:
    """Elements start to stop of the flat buffer, filled with `slots`.

    Attributes:
        stage: stage whose backward completes it; None: the end of the step.
        alone: it is summed over all ranks at once.
        counts: the counts follow its elements.
        own: (target, start, stop) of what this rank keeps.
        pieces: (rank, start, stop) of what each rank keeps, where elements are sent to their owners
            only.
        missing: ids of the parameters whose gradients have not arrived.
    """

    start: int
    stop: int
    slots: Sequence[Slot]
    stage: int | None
    alone: bool = False
    counts: bool = False
    own: list[tuple[Target, int, int]] = field(default_factory=list)
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Sent:
    """A bucket that is under way.

    Attributes:
        buffer: its elements, and the counts.
        is_scaled: the gradients were multiplied before.
        is_last: no other micro-batch adds to these gradients.
        works: its messages.
        received: this rank's part, where that is reduce-scattered.
    """

    bucket: _Bucket
    buffer: Tensor
    is_scaled: bool
    is_last: bool
    works: list[Any] = field(default_factory=list)
    received: Tensor | None = None

    @property
    def values(self) -> Tensor:
        """The gradients that this rank has received."""
        if self.received is not None:
            return self.received
        return self.buffer[: self.bucket.stop - self.bucket.start]

    def own_parts(self) -> list[Tensor]:
        """What this rank keeps of the buffer, for each target."""
        if self.received is not None:
            return [self.received]
        first = self.bucket.start
        return [self.buffer[start - first : stop - first] for _, start, stop in self.bucket.own]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Reduction:
    """Sums the gradients of some parameters over micro-batches and ranks.

    The buffer ends with one number per parameter: the count of ranks that had a gradient. If no
    rank had one, the gradient stays None, so the optimizer leaves the parameter unchanged, as in a
    single process.

    What a micro-batch has no gradient for is sent as zeros when its action ends (`flush`), which is
    also where gradients are taken that came without autograd's hooks, as in a split backward. So
    all ranks of the group must run the same actions.

    Args:
        policy: how.
        slots: place of each parameter, in rising order; the same on all ranks of the group. Gaps
            are zero.
        waves: in the order of sending, parameters that are complete together.
        sums: where gradients add up over micro-batches.
        targets: what this rank keeps, in rising order.
        numel: elements of the buffer, without the counts; by default the gradients'.
    """

    _IN_FLIGHT = 2
    """Most buckets in flight, where a rank must not hold more gradients than that."""

    def __init__(
        self,
        policy: Policy,
        slots: Sequence[Slot],
        waves: Sequence[Wave],
        sums: GradientSums,
        targets: Sequence[Target] = (),
        *,
        numel: int | None = None,
    ) -> None:
        self._policy = policy
        self._sums = sums
        self._slots = list(slots)
        self._targets = targets
        self._numel = slots[-1].stop if numel is None else numel
        self._slot_of = {id(slot.parameter): slot for slot in slots}
        self._dtype = sum_dtype(slots[0].parameter)
        self._device = slots[0].parameter.device
        self._buckets = self._plan(waves)
        self._bucket_of = {
            id(slot.parameter): bucket for bucket in self._buckets for slot in bucket.slots
        }
        self._hooks: list[Any] = []
        if policy.listens:
            self._hooks = [
                slot.parameter.register_post_accumulate_grad_hook(self._mark) for slot in slots
            ]
        self._forget()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._slot_of

    @property
    def each_micro_batch(self) -> bool:
        """Whether gradients are reduced in every micro-batch, not once in a step."""
        return self._policy.control is not None

    def _plan(self, waves: Sequence[Wave]) -> list[_Bucket]:
        buckets = self._parts(waves) if self._policy.scattered is not None else self._runs(waves)
        for bucket in buckets:
            bucket.own = self._own(bucket.start, bucket.stop)
            bucket.pieces = pieces_by_rank(self._policy.shares or (), bucket.start, bucket.stop)
        if not self.each_micro_batch:
            self._place_counts(buckets)
        return buckets

    def _own(self, start: int, stop: int) -> list[tuple[Target, int, int]]:
        """(target, start, stop) of what this rank keeps of some elements."""
        found = [
            (target, max(target.start, start), min(target.stop, stop)) for target in self._targets
        ]
        return [(target, first, last) for target, first, last in found if first < last]

    def _runs(self, waves: Sequence[Wave]) -> list[_Bucket]:
        """Neighbours of one wave, up to the limit."""
        size = self._policy.bucket_bytes
        limit = float("inf") if size is None else max(1, size // self._dtype.itemsize)
        alone = {id(parameter) for parameter in self._policy.alone}
        buckets = []
        for wave in waves:
            used = {
                id(parameter): place
                for place, parameter in enumerate(wave.parameters)
                if parameter in self
            }
            runs: list[list[Slot]] = []
            for slot in sorted((self._slot_of[key] for key in used), key=lambda slot: slot.start):
                last = runs[-1] if runs else None
                if (
                    last is None
                    or slot.start != last[-1].stop
                    or slot.stop - last[0].start > limit
                    or alone & {id(slot.parameter), id(last[-1].parameter)}
                ):
                    runs.append([])
                runs[-1].append(slot)
            if self._policy.from_the_end:
                runs.sort(
                    key=lambda run: min(used[id(slot.parameter)] for slot in run), reverse=True
                )
            for run in runs:
                own = id(run[0].parameter) in alone
                buckets.append(_Bucket(run[0].start, run[-1].stop, run, wave.stage, alone=own))
        return buckets

    def _parts(self, waves: Sequence[Wave]) -> list[_Bucket]:
        """Whole parts, each in the last wave of its members."""
        wave_of = {
            id(parameter): number
            for number, wave in enumerate(waves)
            for parameter in wave.parameters
        }
        found = []
        for start, stop in self._policy.scattered or ():
            members = [slot for slot in self._slots if start <= slot.start < stop]
            last = max((wave_of[id(slot.parameter)] for slot in members), default=0)
            found.append((last, start, _Bucket(start, stop, members, waves[last].stage)))
        return [bucket for *_, bucket in sorted(found, key=lambda each: each[:2])]

    def _place_counts(self, buckets: list[_Bucket]) -> None:
        """Let the counts follow the bucket that is sent last, if that is last in the buffer and all
        ranks get its sums. Otherwise they are a message of their own: also in two levels, where the
        ranks that have the same experts sum over another group meanwhile."""
        last = buckets[-1]
        whole = (
            self._policy.shares is None
            and self._policy.scattered is None
            and self._policy.everyone is None
        )
        # The last stage is sent first, and the buckets of one stage in their order.
        sent_last = not self._policy.from_the_end or all(
            bucket.stage == last.stage for bucket in buckets
        )
        if whole and sent_last and not last.alone and last.stop == self._slots[-1].stop:
            last.stop, last.counts = self._numel, True
        else:
            buckets.append(_Bucket(self._numel, self._numel, [], None, alone=True, counts=True))

    # A step

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self._forget()
        self._active = True
        for bucket in self._buckets:
            self._queues.setdefault(bucket.stage, deque())
        for stage in self._queues:
            self._expect(stage)
        if self._policy.replicas is not None:
            self._policy.replicas.begin()

    def _forget(self) -> None:
        self._active = False
        self._queues: dict[int | None, deque[_Bucket]] = {}
        self._pending: deque[_Sent] = deque()
        self._flat: Tensor | None = None
        self._seen: set[int] = set()
        self._has_sums = False
        self._last: set[int] = set()  # stages whose last backward has begun
        # Buckets whose sums over the replicas have been started.
        self._crossed: set[_Bucket] = set()

    def _expect(self, stage: int | None) -> None:
        found = [bucket for bucket in self._buckets if bucket.stage == stage]
        for bucket in found:
            bucket.missing = {id(slot.parameter) for slot in bucket.slots}
        self._queues[stage].extend(found)

    def before_last_backward(self, stage: int) -> None:
        """Take note that the last backward of a stage begins: no other micro-batch adds to the
        gradients that are sent from now on."""
        self._last.add(stage)

    def _mark(self, parameter: Tensor) -> None:
        """A gradient is complete; autograd says so itself in a micro-batch."""
        if not self._active:
            return  # a backward outside a training step: no other rank runs it
        bucket = self._bucket_of[id(parameter)]
        bucket.missing.discard(id(parameter))
        queue = self._queues[bucket.stage]
        while queue and queue[0].slots and not queue[0].missing:
            self._send(queue.popleft())

    @torch.no_grad()
    def arrived(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note that gradients are complete, for the step or for a micro-batch, at the same
        point on all ranks of the group."""
        for parameter in parameters:
            if parameter in self:
                self._mark(parameter)

    @torch.no_grad()
    def flush(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note that a backward through the stages of `parameters` is over: send the rest of
        them."""
        if not self._active:
            return
        found = {
            self._bucket_of[id(parameter)].stage for parameter in parameters if parameter in self
        }
        for stage in sorted(stage for stage in found if stage is not None):
            while self._queues[stage]:
                self._send(self._queues[stage].popleft())
            if self.each_micro_batch:
                self._expect(stage)

    def _send(self, bucket: _Bucket, scale: float | Tensor | None = None) -> None:
        """Fill a bucket, which removes its gradients, and start to reduce it.

        Args:
            scale: factor of the sums; None if it is not known yet, and they are multiplied at the
                end.
        """
        is_last = not self.each_micro_batch or bucket.stage in self._last
        sent = _Sent(bucket, self._make_room(bucket), is_scaled=scale is not None, is_last=is_last)
        self._fill(sent, scale)
        self._start(sent)
        self._pending.append(sent)
        if (
            self._policy.replicas is not None
            and self._policy.from_the_end
            and not self.each_micro_batch
        ):
            self._crossed.add(bucket)
            self._policy.replicas.start_after(sent.works, sent.own_parts())
        # Gradients of a whole step are only moved, so that any number in flight takes no extra
        # memory; waiting for other ranks would stall the stages that still compute.
        while self.each_micro_batch and len(self._pending) > self._IN_FLIGHT:
            self._receive()

    def _make_room(self, bucket: _Bucket) -> Tensor:
        stop = bucket.stop + (len(self._slots) if bucket.counts else 0)
        if not self._policy.in_one_tensor:
            return torch.empty(stop - bucket.start, dtype=self._dtype, device=self._device)
        if self._flat is None:
            self._flat = torch.empty(
                self._numel + len(self._slots), dtype=self._dtype, device=self._device
            )
            for start, end in gaps(self._slots, self._numel):
                self._flat[start:end].zero_()
        return self._flat[bucket.start : stop]

    def _fill(self, sent: _Sent, scale: float | Tensor | None) -> None:
        bucket = sent.bucket
        for slot in bucket.slots:
            target = sent.buffer[slot.start - bucket.start : slot.stop - bucket.start].view(
                slot.parameter.shape
            )
            gradient = self._take(slot.parameter)
            if gradient is None:
                target.zero_()
                continue
            self._seen.add(id(slot.parameter))
            if scale is None:
                target.copy_(gradient.detach())
            else:
                torch.mul(gradient, scale, out=target)
        if bucket.counts:
            counts = sent.buffer[bucket.stop - bucket.start :]
            counts.fill_(1.0)
            for index in self._absent_here():
                counts[index] = 0.0

    def _absent_here(self) -> list[int]:
        return [
            place for place, slot in enumerate(self._slots) if id(slot.parameter) not in self._seen
        ]

    def _take(self, parameter: nn.Parameter) -> Tensor | None:
        if not self.each_micro_batch:
            gradient = self._sums[parameter]
            self._sums[parameter] = None
            return gradient
        gradient = parameter.grad
        parameter.grad = None
        return gradient

    def _start(self, sent: _Sent) -> None:
        """Start the messages of a bucket."""
        bucket, group = sent.bucket, self._policy.group
        if bucket.alone and self._policy.everyone is not None:
            group = self._policy.everyone
        if dist.get_world_size(group) == 1:
            return
        if self._policy.scattered is not None and bucket.slots:
            size = (bucket.stop - bucket.start) // dist.get_world_size(group)
            sent.received = torch.empty(size, dtype=self._dtype, device=self._device)
            sent.works = [reduce_scatter_flat(sent.received, sent.buffer, group)]
        elif self._policy.shares is not None and bucket.slots:
            for rank, start, stop in bucket.pieces:
                piece = sent.buffer[start - bucket.start : stop - bucket.start]
                owner = dist.get_global_rank(group, rank)
                sent.works.append(exchange.start_reduce(piece, owner, group))
        else:
            sent.works = [exchange.start_all_reduce(sent.buffer, group)]

    # Its end

    def finish(self, scale: float | Tensor) -> list[nn.Parameter]:
        """Send the rest, wait for everything, and multiply the sums by `scale`.

        Returns:
            The parameters that no rank had a gradient for.
        """
        absent = (
            self._finish_micro_batches(scale) if self.each_micro_batch else self._finish_step(scale)
        )
        self._forget()
        return absent

    def _finish_step(self, scale: float | Tensor) -> list[nn.Parameter]:
        for queue in self._queues.values():
            while queue:
                self._send(queue.popleft(), scale)
        if late := [slot for slot in self._slots if self._sums[slot.parameter] is not None]:
            shape = tuple(late[0].parameter.shape)
            raise RuntimeError(f"A gradient of shape {shape} came after its bucket had been sent.")
        self._wait()
        scale_(
            [sent.values for sent in self._pending if not sent.is_scaled and sent.bucket.slots],
            scale,
        )
        absent = self._absent_everywhere()
        for sent in self._pending:
            self._deliver(sent, absent)
        if self._flat is not None and self._policy.scattered is None:
            for target in self._targets:
                assert target.keep is not None
                target.keep(self._flat[target.start : target.stop])
        return absent

    def _wait(self) -> None:
        """Wait for the buckets, and for the sums of this rank's parts over the replicas."""
        replicas = self._policy.replicas
        if replicas is not None:
            replicas.finish()
        for sent in self._pending:
            sent.wait()
            if replicas is not None and not sent.bucket.alone and sent.bucket not in self._crossed:
                replicas.start(sent.own_parts())
        if replicas is not None:
            replicas.finish()

    def _absent_everywhere(self) -> list[nn.Parameter]:
        """Those parameters that neither this rank nor another one had a gradient for. Only a rank
        that lacks one reads the counts, because on an accelerator reading waits for the
        reduction."""
        [last] = [sent for sent in self._pending if sent.bucket.counts]
        counts = last.buffer[last.bucket.stop - last.bucket.start :]
        return [
            self._slots[index].parameter
            for index in self._absent_here()
            if counts[index].item() == 0
        ]

    def _deliver(self, sent: _Sent, absent: Sequence[nn.Parameter]) -> None:
        """Give the sums of a bucket to those who step them."""
        missing = {id(parameter) for parameter in absent}
        for slot in sent.bucket.slots if self._policy.into_gradients else ():
            first = slot.start - sent.bucket.start
            view = sent.buffer[first : first + slot.stop - slot.start].view(slot.parameter.shape)
            self._sums[slot.parameter] = None if id(slot.parameter) in missing else view
        for (target, start, stop), part in zip(sent.bucket.own, sent.own_parts(), strict=True):
            if target.total is not None:
                target.total()[start - target.start : stop - target.start] += part
            elif self._policy.scattered is not None:
                assert target.keep is not None
                target.keep(part)

    # In every micro-batch

    def _finish_micro_batches(self, scale: float | Tensor) -> list[nn.Parameter]:
        """One small all-reduce in host memory: of the counts, and of gradients that came after
        their bucket was sent. (A parameter that is used in several segments of a reentrant
        checkpoint gets several in one backward.)"""
        self._receive_all()
        parameters = [slot.parameter for slot in self._slots]
        rest = {id(parameter): self._sums[parameter] for parameter in parameters}
        seen_here = [float(id(parameter) in self._seen) for parameter in parameters]
        late_here = [float(rest[id(parameter)] is not None) for parameter in parameters]
        counts = torch.tensor(seen_here + late_here)
        if dist.get_world_size(self._policy.control) > 1:
            dist.all_reduce(counts, group=self._policy.control)
        seen, late = counts.view(2, -1).tolist()
        for parameter, count in zip(parameters, late, strict=True):
            if count > 0:
                self._sums[parameter] = None
                self._add_late(parameter, rest[id(parameter)])
        for target in self._targets:
            assert target.total is not None
            target.total().mul_(scale)
        return [
            p for p, early, more in zip(parameters, seen, late, strict=True) if early == more == 0
        ]

    def _receive(self) -> None:
        """Wait for the oldest bucket and add this rank's part of it."""
        sent = self._pending.popleft()
        sent.wait()
        if not self._has_sums:  # with the first bucket, for all: no allocation later in a step
            self._has_sums = True
            for target in self._targets:
                assert target.total is not None
                target.total()
        for total, part in zip(self._totals(sent.bucket), sent.own_parts(), strict=True):
            total += part
        if sent.is_last:
            self._cross(sent.bucket)

    def _totals(self, bucket: _Bucket) -> list[Tensor]:
        """This rank's parts of a bucket in its sums."""
        return [
            target.total()[start - target.start : stop - target.start]
            for target, start, stop in bucket.own
            if target.total is not None
        ]

    def _cross(self, bucket: _Bucket) -> None:
        """Start to sum this rank's part of a bucket over its replicas, unless that has been
        done."""
        if self._policy.replicas is not None and bucket not in self._crossed:
            self._crossed.add(bucket)
            self._policy.replicas.start(self._totals(bucket))

    def _receive_all(self) -> None:
        """Wait for the buckets in flight, and for the sums of all buckets over the replicas."""
        while self._pending:
            self._receive()
        if self._policy.replicas is not None:
            for bucket in self._buckets:
                self._cross(bucket)  # of stages whose last backward nobody announced
            self._policy.replicas.finish()

    def _add_late(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        bucket = self._alone(parameter)
        buffer = torch.zeros(bucket.stop - bucket.start, dtype=self._dtype, device=self._device)
        if gradient is not None:
            buffer.copy_(gradient.detach().reshape(-1))
        sent = _Sent(
            bucket,
            buffer,
            is_scaled=False,
            is_last=False,
            works=[exchange.start_all_reduce(buffer, self._policy.group)],
        )
        if self._policy.replicas is not None:
            self._policy.replicas.start_after(sent.works, sent.own_parts())
            self._policy.replicas.finish()
        self._pending.append(sent)
        self._receive()

    def _alone(self, parameter: nn.Parameter) -> _Bucket:
        slot = self._slot_of[id(parameter)]
        return _Bucket(slot.start, slot.stop, [slot], None, own=self._own(slot.start, slot.stop))

    def local(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of a parameter's gradient so far, flattened; the same pieces on ranks
        with the same buffer."""
        while self._pending:
            self._receive()
        if self._policy.replicas is not None:
            self._policy.replicas.finish()
        pieces = self._totals(self._alone(parameter))
        return (
            torch.cat(pieces) if pieces else torch.zeros(0, dtype=self._dtype, device=self._device)
        )

    def buffers(self) -> list[Tensor]:
        """Buffers of gradients that are held at the moment, apart from the gradients themselves."""
        held = [
            self._flat,
            *(sent.received for sent in self._pending),
            *(sent.buffer for sent in self._pending),
        ]
        return [buffer for buffer in held if buffer is not None]

    def close(self) -> None:
        """Let go of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._slots, self._slot_of, self._buckets, self._bucket_of = [], [], {}, [], {}
        self._targets = ()
        self._forget()
