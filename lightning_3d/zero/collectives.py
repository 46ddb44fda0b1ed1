"""Collectives on flat buffers, under the names that the installed torch has for them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor


def all_gather_flat(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to collect the parts of all ranks, equal in size, one behind the other. Returns the work to wait for.

    torch 2.13 renamed `all_gather_into_tensor` to `all_gather_single`; the old name warns.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def reduce_scatter_flat(part: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start to sum `whole` over the ranks and to leave each its part. Returns the work to wait for.

    torch 2.13 renamed `reduce_scatter_tensor` to `reduce_scatter_single`; the old name warns.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, whole, group=group, async_op=True)
