"""Sums of the gradients of one rank over the micro-batches of a step, and their flat buffers for
collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.collectives import reduce_scatter_flat

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


@dataclass
class _Message:
    """Elements start to stop of the buffer, filled with the slots `members`: one collective, once
    all of them are complete. It is one of all data-parallel ranks (`everywhere`), or of the group
    of the reduction, which may be a part of them."""

    start: int
    stop: int
    members: Sequence[int]
    wave: int
    scatters: bool = False
    everywhere: bool = False


class FlatGradients:
    """A layout of gradients in one flat buffer that is summed over a group, in buckets or in parts
    that go to one rank each.

    The buffer exists from the first message on until its gradients are replaced; a gradient is
    freed as soon as it is copied. Without `whole`, each message has memory of its own, so that
    messages that are sent early take none for the others. After the gradients, the buffer has one
    number per parameter: the count of ranks that had a gradient. If no rank had one, the gradient
    stays None, so the optimizer leaves the parameter unchanged, as in a single process.

    Messages are sent in one order on all ranks: by wave, then by place.

    Args:
        slots: place of each parameter, in rising order; the same on all ranks of the group. Gaps
            are zero.
        numel: elements of the buffer, without the counts.
        bucket_bytes: upper bound of the bytes of one all-reduce, except for a single larger
            parameter; None for one all-reduce.
        alone: parameters that are reduced in a collective of their own. How a collective associates
            its sum depends on an element's place in it and on its length; copies on two ranks stay
            bit-equal only when these are the same.
        waves: by id of a parameter, when in a step its gradient is complete: 0, 1, ...; 0 for those
            that are not named.
        scattered: parts (start, stop) of the buffer whose length the group's size divides; each is
            reduce-scattered. None: all-reduces.
        whole: all messages lie in one tensor.
        everyone: all ranks whose gradients belong together, where the group of the reduction is
            only a part of them. The counts and what is reduced alone are summed over all of them.

    Attributes:
        absent: parameters that no rank had a gradient for in the latest reduction.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        numel: int,
        *,
        bucket_bytes: int | None,
        alone: Iterable[nn.Parameter] = (),
        waves: Mapping[int, int] | None = None,
        scattered: Sequence[tuple[int, int]] | None = None,
        whole: bool = True,
        everyone: dist.ProcessGroup | None = None,
    ) -> None:
        self._whole, self._everyone = whole, everyone
        self._slots = list(slots)
        self._alone = {id(parameter) for parameter in alone}
        self._waves = [(waves or {}).get(id(slot.parameter), 0) for slot in self._slots]
        self.numel = numel
        first = self._slots[0].parameter
        self._dtype, self._device = sum_dtype(first), first.device
        self._total = numel + len(self._slots)
        self.absent: list[nn.Parameter] = []
        messages = self._buckets(bucket_bytes) if scattered is None else self._parts(scattered)
        self._messages = sorted(messages, key=lambda message: (message.wave, message.start))
        self._message_of = {
            index: message.start for message in self._messages for index in message.members
        }
        self._scattered = scattered
        self._gaps = self._find_gaps()
        self.forget()

    @property
    def slots(self) -> Sequence[Slot]:
        """Place of each parameter."""
        return self._slots

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers that are held at the moment, in addition to the parameters' own gradients."""
        flat = [self._flat] if self._flat is not None else []
        pieces = [] if self._whole else self._pieces.values()
        return [*flat, *pieces, *self._received.values(), *(copy for _, copy in self._apart)]

    def forget(self) -> None:
        """Drop everything of the step before."""
        self._flat: Tensor | None = None
        self._pieces: dict[int, Tensor] = {}
        self._next = 0
        self._pending: list[Any] = []
        self._absent: list[int] = []
        self._unscaled: list[Tensor] = []
        self._received: dict[int, Tensor] = {}
        self._apart: list[tuple[Slot, Tensor]] = []

    def _buckets(self, bucket_bytes: int | None) -> list[_Message]:
        """Each begins with its first slot and ends with its last. The last one holds the counts
        too, where it is the last to be sent and nothing must be alone in it."""
        limit = float("inf") if bucket_bytes is None else bucket_bytes / self._dtype.itemsize
        runs: list[list[int]] = []
        for index, slot in enumerate(self._slots):
            apart = any(
                id(self._slots[i].parameter) in self._alone for i in (index, max(index - 1, 0))
            )
            apart = apart or self._waves[index] != self._waves[max(index - 1, 0)]
            if not runs or apart or slot.stop - self._slots[runs[-1][0]].start > limit:
                runs.append([])
            runs[-1].append(index)
        buckets = [
            _Message(self._slots[run[0]].start, self._slots[run[-1]].stop, run, self._waves[run[0]])
            for run in runs
        ]
        for bucket in buckets:
            bucket.everywhere = id(self._slots[bucket.members[0]].parameter) in self._alone
        last = buckets[-1]
        if last.everywhere or last.wave < max(self._waves) or self._everyone is not None:
            return [*buckets, self._counts()]
        last.stop = self._total
        return buckets

    def _parts(self, scattered: Sequence[tuple[int, int]]) -> list[_Message]:
        messages = [self._counts()]
        for start, stop in scattered:
            members = [
                index for index, slot in enumerate(self._slots) if start <= slot.start < stop
            ]
            wave = max((self._waves[index] for index in members), default=0)
            messages.append(_Message(start, stop, members, wave, scatters=True))
        return messages

    def _counts(self) -> _Message:
        # In two levels after all waves: the replicas of a shard may be those that have the same
        # experts, and sum over one group meanwhile.
        wave = max(self._waves) + (self._everyone is not None)
        return _Message(self.numel, self._total, [], wave, everywhere=True)

    def _find_gaps(self) -> list[tuple[int, int]]:
        """(start, stop) of the gaps between slots and after the last one."""
        starts = [*(slot.start for slot in self._slots), self.numel]
        ends = [0, *(slot.stop for slot in self._slots)]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def start(
        self,
        wave: int,
        sums: GradientSums,
        group: dist.ProcessGroup,
        scale: float | Tensor | None = None,
    ) -> None:
        """Remove the gradients that are complete up to `wave` from `sums` and start to reduce them.

        Args:
            scale: factor of the sums; None if it is not known yet, and they are multiplied at the
                end.
        """
        while self._next < len(self._messages) and self._messages[self._next].wave <= wave:
            message = self._messages[self._next]
            self._next += 1
            piece = self._pieces[message.start] = self._make_room(message)
            self._absent += self._fill(message, piece, sums, scale)
            if message.stop == self._total:
                self._fill_counts(piece[self.numel - message.start :])
            if message.scatters:
                self._scatter(message, group, scale)
                continue
            if scale is None and message.members:
                self._unscaled.append(piece[: self.numel - message.start])
            ranks = self._all_of(group) if message.everywhere else group
            if dist.get_world_size(ranks) > 1:
                self._pending.append(exchange.start_all_reduce(piece, ranks))

    def _all_of(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        return group if self._everyone is None else self._everyone

    def _make_room(self, message: _Message) -> Tensor:
        if not self._whole:
            return torch.empty(message.stop - message.start, dtype=self._dtype, device=self._device)
        if self._flat is None:
            self._flat = torch.empty(self._total, dtype=self._dtype, device=self._device)
            for start, stop in self._gaps:
                self._flat[start:stop].zero_()
        return self._flat[message.start : message.stop]

    def _scatter(
        self, message: _Message, group: dist.ProcessGroup, scale: float | Tensor | None
    ) -> None:
        assert self._flat is not None
        for slot in (self._slots[index] for index in message.members):
            if id(slot.parameter) in self._alone:
                self._apart.append((slot, self._flat[slot.start : slot.stop].clone()))
                self._pending.append(
                    exchange.start_all_reduce(self._apart[-1][1], self._all_of(group))
                )
        size = (message.stop - message.start) // dist.get_world_size(group)
        part = self._received[message.start] = torch.empty(
            size, dtype=self._dtype, device=self._device
        )
        self._pending.append(
            reduce_scatter_flat(part, self._flat[message.start : message.stop], group)
        )
        if scale is None:
            self._unscaled.append(part)

    def all_reduce(
        self, sums: GradientSums, group: dist.ProcessGroup, scale: float | Tensor = 1.0
    ) -> Tensor | None:
        """Replace each gradient by `scale` times its sum over `group`; a rank without it counts as
        zero.

        Returns:
            The flat buffer, shape (numel,), of which the gradients are views now; None without
            `whole`.
        """
        absent = self._finish(sums, group, scale)
        nowhere = self._nowhere(absent)
        self.absent = [self._slots[index].parameter for index in sorted(nowhere)]
        for index, slot in enumerate(self._slots):
            start = self._message_of[index]
            view = self._pieces[start][slot.start - start : slot.stop - start].view(
                slot.parameter.shape
            )
            sums[slot.parameter] = None if index in nowhere else view
        flat = self._flat
        self.forget()
        return None if flat is None else flat[: self.numel]

    def _nowhere(self, absent: Iterable[int]) -> set[int]:
        """Those of the slots that this rank had no gradient for and no other rank either. Only a
        rank that lacks one reads the counts, because on an accelerator reading waits for the
        reduction."""
        last = max(self._pieces)
        return {
            index for index in absent if self._pieces[last][self.numel + index - last].item() == 0
        }

    def reduce_scatter(
        self, sums: GradientSums, group: dist.ProcessGroup, scale: float | Tensor = 1.0
    ) -> list[Tensor]:
        """Take the gradients out of `sums` and give each rank its part of `scale` times their sum
        over `group`.

        One reduce-scatter for each part in `scattered`; a small all-reduce of the counts; one
        all-reduce for each parameter that is reduced alone.

        Returns:
            This rank's share of each part, contiguous and of equal size on all ranks.
        """
        absent = self._finish(sums, group, scale)
        assert self._scattered is not None
        parts = [self._received[start] for start, _ in self._scattered]
        for (start, _), part in zip(self._scattered, parts, strict=True):
            own = start + dist.get_rank(group) * part.numel()
            for slot, copy in self._apart:
                first, last = max(slot.start, own), min(slot.stop, own + part.numel())
                if first < last:
                    part[first - own : last - own] = copy[first - slot.start : last - slot.start]
        nowhere = self._nowhere(absent)
        self.absent = [self._slots[index].parameter for index in absent if index in nowhere]
        self.forget()
        return parts

    def _finish(
        self, sums: GradientSums, group: dist.ProcessGroup, scale: float | Tensor
    ) -> list[int]:
        """Send the rest, wait, and scale what was sent before. Returns the slots this rank had no
        gradients for."""
        apart = len(self._apart)
        self.start(self._messages[-1].wave, sums, group, scale)
        for work in self._pending:
            work.wait()
        scale_([*self._unscaled, *(copy for _, copy in self._apart[:apart])], scale)
        return self._absent

    def _fill(
        self, message: _Message, piece: Tensor, sums: GradientSums, scale: float | Tensor | None
    ) -> list[int]:
        """Copy the gradients of one message; return the indices of those that are not there."""
        absent = []
        for index in message.members:
            slot = self._slots[index]
            target = piece[slot.start - message.start : slot.stop - message.start].view(
                slot.parameter.shape
            )
            gradient = sums[slot.parameter]
            if gradient is None:
                absent.append(index)
                target.zero_()
            elif scale is None:
                target.copy_(gradient)
            else:
                torch.mul(gradient, scale, out=target)
            sums[slot.parameter] = None
        return absent

    def _fill_counts(self, counts: Tensor) -> None:
        counts.fill_(1.0)
        for index in self._absent:
            counts[index] = 0.0
