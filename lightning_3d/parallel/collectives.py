"""Collectives over flat tensors, for all backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_3d.compat.torch import all_gather_by_name
from lightning_3d.parallel.witness import received, sent
from lightning_3d.tracing.messages import at_once, under_way

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


@at_once("all-reduce", "x")
def all_reduce_flat(x: Tensor, group: ProcessGroup | None, op: Any = None) -> None:
    """Replace `x`, contiguous, by its sum over the group, or the result of another operation.

    A group of one rank sends nothing: in a `Mesh` it is one of gloo, and the host would wait for
    the GPU.
    """
    import torch.distributed as dist

    if dist.get_world_size(group) == 1:
        return
    from lightning_3d.parallel import gloo_exchange as exchange

    op = dist.ReduceOp.SUM if op is None else op
    sent("all-reduce", x)
    if exchange.fits_whole(x, group):
        exchange.all_reduce(x, group, op)
    else:
        dist.all_reduce(x, op, group)
    received("all-reduce", x)


@under_way("all-gather", "part")
def all_gather_flat(whole: Tensor, part: Tensor, group: ProcessGroup) -> Work:
    """Start to gather the parts of all ranks, equal in size, one after the other. Returns the work
    to wait for.

    A group of one rank sends nothing. torch 2.13 renamed `all_gather_into_tensor` to
    `all_gather_single`; the old name warns.
    """
    import torch.distributed as dist

    from lightning_3d.parallel import gloo_exchange as exchange

    if dist.get_world_size(group) == 1:
        whole.copy_(part)
        return exchange.finished()
    sent("all-gather", part)
    if exchange.fits(part, group):
        return exchange.all_gather(whole, part, group)
    return all_gather_by_name(whole, part, group)


@under_way("reduce-scatter", "whole")
def reduce_scatter_flat(part: Tensor, whole: Tensor, group: ProcessGroup) -> Work:
    """Start to sum `whole` over the ranks and to give each rank its part. Returns the work to wait
    for.

    A group of one rank sends nothing. torch 2.13 renamed `reduce_scatter_tensor` to
    `reduce_scatter_single`; the old name warns.
    """
    import torch.distributed as dist

    from lightning_3d.parallel import gloo_exchange as exchange

    if dist.get_world_size(group) == 1:
        part.copy_(whole)
        return exchange.finished()
    sent("reduce-scatter", whole)
    if exchange.fits(whole, group):
        return exchange.reduce_scatter(part, whole, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, whole, group=group, async_op=True)
