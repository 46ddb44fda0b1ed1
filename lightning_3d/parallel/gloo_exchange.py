"""Sums and gathers over gloo by one exchange between all pairs of ranks.

gloo's own collectives pass messages round a ring, in n - 1 steps over n ranks or twice as many, and every step wakes threads in
both neighbours. For the messages of a training step on CPU that is most of the time. Here every rank sends to all others at
once, and adds up what it receives itself, in the order of the ranks: all ranks get the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp, all_to_all_single, get_backend, get_rank, get_world_size

from lightning_3d.compat.torch_fake import FAKE_GLOO

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

SMALL = 2**20  # bytes that a rank sends for the sum of a tensor; over more than two ranks a ring sends fewer


def uses_gloo(group: ProcessGroup | None) -> bool:
    """True if the ranks communicate through gloo, or a dry run pretends that they do."""
    return get_backend(group) in ("gloo", FAKE_GLOO)


def fits(x: Tensor, group: ProcessGroup | None) -> bool:
    """True if `all_gather` and `reduce_scatter` support this tensor: on CPU, over ranks that use gloo."""
    return x.device.type == "cpu" and uses_gloo(group) and get_world_size(group) > 1


def fits_whole(x: Tensor, group: ProcessGroup | None) -> bool:
    """True if `all_reduce` supports it: over two ranks, or if the tensor is small."""
    return fits(x, group) and (get_world_size(group) == 2 or x.nbytes * (get_world_size(group) - 1) <= SMALL)


def all_reduce(x: Tensor, group: ProcessGroup | None, op: Any = ReduceOp.SUM) -> None:
    """Replace `x`, contiguous, by its sum or maximum over the group."""
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
    copies = part.view(1, -1).expand(get_world_size(group), -1).contiguous()
    return _Sent(all_to_all_single(whole.view(copies.shape), copies, group=group, async_op=True), copies)  # type: ignore[return-value]


def reduce_scatter(part: Tensor, whole: Tensor, group: ProcessGroup | None) -> Work:
    """Start to sum `whole` over the ranks and to give each rank its part. Returns the work to wait for."""
    received = torch.empty_like(whole).view(get_world_size(group), -1)
    work = all_to_all_single(received, whole.view(received.shape), group=group, async_op=True)
    return _Sum(work, received, part)  # type: ignore[return-value]


class _Sent:
    """Work that keeps its tensors alive while they are sent."""

    def __init__(self, work: Work, sent: Tensor) -> None:
        self._work, self._sent = work, sent

    def wait(self) -> None:
        self._work.wait()


class _Sum:
    """Work that is done when the received rows are added up."""

    def __init__(self, work: Work, received: Tensor, part: Tensor) -> None:
        self._work, self._received, self._part = work, received, part

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._received, 0, dtype=self._part.dtype, out=self._part.view(-1))
