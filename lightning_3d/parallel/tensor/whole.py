"""The whole of a parameter of which a tensor-parallel rank holds a shard, for code outside of the
model."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel.sharding import ShardSpec


def gather_shards(
    shard: Tensor,
    spec: ShardSpec,
    group: dist.ProcessGroup,
    tp_index: int,
    patience: timedelta | None = None,
) -> Tensor:
    """Gather a parameter without gradients.

    Args:
        patience: how long to wait for the other ranks; None for the timeout of the group.

    Raises:
        RuntimeError: another rank did not take part for so long.
    """
    full = shard.new_zeros(spec.global_shape)
    if tp_index == min(spec.tp_replicas):
        spec.paste(shard, full)
    work = dist.all_reduce(full, group=group, async_op=patience is not None)
    if work is not None:
        work.wait(patience)
    return full


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, spec: ShardSpec, group: dist.ProcessGroup, tp_index: int
    ) -> Tensor:
        ctx.spec = spec
        return gather_shards(shard, spec, group, tp_index) if spec.is_cut else shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        spec: ShardSpec = ctx.spec
        # Every rank computes the whole gradient. The ranks that add up theirs at the end of the
        # step each give their share of it.
        shares = max(1, len(spec.tp_grad_sum))
        own = spec.cut(gradients[0]) if spec.is_cut else gradients[0]
        return own / shares, None, None, None


def whole(shard: Tensor, spec: ShardSpec, group: dist.ProcessGroup, tp_index: int) -> Tensor:
    """Gather a parameter of which tensor-parallel ranks hold shards: one all-reduce; none for a
    replicated one.

    Every rank must use the result alike: the gradient of its shard is taken from the gradient that
    it computes itself.

    Args:
        shard: this rank's parameter.
        group: the tensor-parallel ranks.
        tp_index: place of this rank among them.
    """
    found: Tensor = _Whole.apply(shard, spec, group, tp_index)
    return found
