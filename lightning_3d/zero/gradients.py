"""Where the gradients of one rank add up over the micro-batches of a step, and their flat buffers for collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.zero.collectives import reduce_scatter_flat

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Types too coarse to add many micro-batches in: their gradients are summed in float32."""


def sum_dtype(parameter: Tensor) -> torch.dtype:
    """The type in which gradients of `parameter` are summed and reduced."""
    return torch.float32 if parameter.dtype in LOW_PRECISION else parameter.dtype


class GradientSums:
    """The local gradients of some parameters, None where nothing has arrived since `clear`.

    Parameters of 32 and more bits sum in their own `.grad`, as autograd does. For bf16 ones `.grad` is only a place to
    arrive in: `absorb` adds it to a float32 sum and removes it. (Summed in bf16, 32 micro-batches are off by 6e-3
    relative.)
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
        """Add what arrived in `.grad` of bf16 parameters (of all of them by default) to the float32 sums."""
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


@dataclass(frozen=True)
class Slot:
    """A parameter's place in a flat buffer: elements `start` to `stop`."""

    parameter: nn.Parameter
    start: int
    stop: int


def end_to_end(parameters: Iterable[nn.Parameter]) -> list[Slot]:
    """Slots for parameters one behind the other."""
    slots, start = [], 0
    for parameter in parameters:
        slots.append(Slot(parameter, start, start + parameter.numel()))
        start += parameter.numel()
    return slots


class FlatGradients:
    """A layout of gradients in one flat buffer that is summed over a group in buckets.

    The buffer exists from `all_reduce` on until its gradients are replaced; a gradient is freed as soon as it is
    copied. Behind the gradients lies one number per parameter, the count of ranks that had a gradient: one that no rank
    had stays None, as in a single process, where the optimizer would leave such a parameter alone.

    Args:
        slots: where each parameter lies, rising; the same on all ranks of the group. Gaps are zero.
        numel: elements of the buffer, without the counts.
        bucket_bytes: upper bound of the bytes of one all-reduce, except for a single larger parameter; None for one
            all-reduce.
        alone: parameters that are reduced in a collective of their own. How a collective associates its sum depends on
            an element's place in it and on its length; copies on two ranks stay bit-equal only when these are the same.

    Attributes:
        nowhere: parameters that no rank had a gradient for in the latest reduction.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        numel: int,
        *,
        bucket_bytes: int | None,
        alone: Iterable[nn.Parameter] = (),
    ) -> None:
        self._slots = list(slots)
        self._alone = {id(parameter) for parameter in alone}
        self.numel = numel
        first = self._slots[0].parameter
        self._dtype, self._device = sum_dtype(first), first.device
        self._total = numel + len(self._slots)
        self.nowhere: list[nn.Parameter] = []
        self._buckets = self._cut(bucket_bytes)
        self._gaps = self._find_gaps()

    @property
    def slots(self) -> Sequence[Slot]:
        """Where each parameter lies."""
        return self._slots

    @property
    def collectives(self) -> int:
        """All-reduces of one step."""
        return len(self._buckets)

    def _cut(self, bucket_bytes: int | None) -> list[tuple[int, int, list[int]]]:
        """(start, stop, indices of slots) of each bucket, which begins with its first slot and ends with its last.

        The last bucket holds the counts too, and nothing else when its parameter would be alone.
        """
        limit = float("inf") if bucket_bytes is None else bucket_bytes / self._dtype.itemsize
        runs: list[list[int]] = []
        for index, slot in enumerate(self._slots):
            apart = any(id(self._slots[i].parameter) in self._alone for i in (index, max(index - 1, 0)))
            if not runs or apart or slot.stop - self._slots[runs[-1][0]].start > limit:
                runs.append([])
            runs[-1].append(index)
        buckets = [(self._slots[run[0]].start, self._slots[run[-1]].stop, run) for run in runs]
        start, _, last = buckets.pop()
        if id(self._slots[last[-1]].parameter) in self._alone:
            return [*buckets, (start, self._slots[last[-1]].stop, last), (self.numel, self._total, [])]
        return [*buckets, (start, self._total, last)]

    def _find_gaps(self) -> list[tuple[int, int]]:
        """(start, stop) of what lies between slots and behind the last one."""
        starts = [*(slot.start for slot in self._slots), self.numel]
        ends = [0, *(slot.stop for slot in self._slots)]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def all_reduce(self, sums: GradientSums, group: dist.ProcessGroup, scale: float | Tensor = 1.0) -> Tensor:
        """Replace each gradient by `scale` times its sum over `group`; a rank without it counts as zero.

        One all-reduce for each bucket, started as soon as it is filled.

        Returns:
            The flat buffer, shape (numel,), of which the gradients are views now.
        """
        flat, pending, absent = self._begin(), [], []
        for start, stop, members in self._buckets:
            absent += self._fill(flat, members, sums, scale)
            if stop == self._total:
                self._fill_counts(flat, absent)
            if dist.get_world_size(group) > 1:
                pending.append(dist.all_reduce(flat[start:stop], group=group, async_op=True))
        for work in pending:
            work.wait()
        # Only a rank that lacks a gradient looks at the counts: on an accelerator that waits for the reduction.
        nowhere = {index for index in absent if flat[self.numel + index].item() == 0}
        self.nowhere = [self._slots[index].parameter for index in sorted(nowhere)]
        for index, slot in enumerate(self._slots):
            view = flat[slot.start : slot.stop].view(slot.parameter.shape)
            sums[slot.parameter] = None if index in nowhere else view
        return flat[: self.numel]

    def reduce_scatter(
        self, sums: GradientSums, group: dist.ProcessGroup, cuts: Sequence[tuple[int, int]], scale: float | Tensor = 1.0
    ) -> list[Tensor]:
        """Take the gradients away and leave each rank its part of `scale` times their sum over `group`.

        One reduce-scatter for each of `cuts`, parts (start, stop) of the buffer whose length the group's size divides; a small
        all-reduce of the counts; one all-reduce for each parameter that is reduced alone.

        Returns:
            The part of this rank of each cut, contiguous and of equal size on all ranks.
        """
        flat = self._begin()
        absent = self._fill(flat, range(len(self._slots)), sums, scale)
        self._fill_counts(flat, absent)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        alone = [(slot, flat[slot.start : slot.stop].clone()) for slot in self._slots if id(slot.parameter) in self._alone]
        pending = [dist.all_reduce(copy, group=group, async_op=True) for _, copy in alone]
        pending.append(dist.all_reduce(flat[self.numel :], group=group, async_op=True))
        parts = []
        for start, stop in cuts:
            parts.append(torch.empty((stop - start) // ranks, dtype=self._dtype, device=self._device))
            pending.append(reduce_scatter_flat(parts[-1], flat[start:stop], group))
        for work in pending:
            work.wait()
        for (start, _), part in zip(cuts, parts, strict=True):
            own = start + rank * part.numel()
            for slot, copy in alone:
                first, last = max(slot.start, own), min(slot.stop, own + part.numel())
                if first < last:
                    part[first - own : last - own] = copy[first - slot.start : last - slot.start]
        self.nowhere = [self._slots[index].parameter for index in absent if flat[self.numel + index].item() == 0]
        return parts

    def _begin(self) -> Tensor:
        """An empty buffer with zeros where no gradient lies."""
        flat = torch.empty(self._total, dtype=self._dtype, device=self._device)
        for start, stop in self._gaps:
            flat[start:stop].zero_()
        return flat

    def _fill(self, flat: Tensor, members: Iterable[int], sums: GradientSums, scale: float | Tensor) -> list[int]:
        """Copy the scaled gradients of one bucket; return the indices of those that are not there."""
        absent = []
        for index in members:
            slot = self._slots[index]
            target = flat[slot.start : slot.stop].view(slot.parameter.shape)
            gradient = sums[slot.parameter]
            if gradient is None:
                absent.append(index)
                target.zero_()
            else:
                torch.mul(gradient, scale, out=target)
            sums[slot.parameter] = None
        return absent

    def _fill_counts(self, flat: Tensor, absent: list[int]) -> None:
        flat[self.numel :].fill_(1.0)
        for index in absent:
            flat[self.numel + index] = 0.0
