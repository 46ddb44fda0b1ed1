"""The four collectives between a tensor that all tensor-parallel ranks hold alike and one of which
each holds a part.

                     forward          backward
    copy_to_region     nothing          all-reduce      replicated -> the input of column-parallel layers
    reduce_from_region all-reduce       nothing         partial sums -> replicated
    gather_from_region all-gather       own slice       shards -> replicated
    split_to_region    own slice        all-gather      replicated -> shards

A replicated tensor has the same value and the same gradient on every rank of the group. Everything
is a plain tensor. All ranks call the same functions in the same order, with the same shapes. The
first two are f and g of Megatron-LM (Shoeybi et al. 2019, figure 3).
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.compat.torch import (
    collectives_are_functional,
    functional_gather,
    functional_scatter_sum,
    functional_sum,
)
from lightning_3d.parallel.collectives import all_gather_flat, all_reduce_flat, reduce_scatter_flat
from lightning_3d.parallel.witness import received


def copy_to_region(x: Tensor, group: dist.ProcessGroup, *, owned: bool = False) -> Tensor:
    """`x` itself; its gradient is summed over the group by one all-reduce.

    Args:
        owned: the gradient that arrives may be overwritten. Right when all consumers of the result
            are matrix products, which make fresh gradients; an addition hands the same gradient
            tensor to several receivers.
    """
    return _Copy.apply(x, group, owned)


def reduce_from_region(x: Tensor, group: dist.ProcessGroup, *, owned: bool = False) -> Tensor:
    """The sum of `x` over the group by one all-reduce.

    Args:
        owned: `x` may be overwritten: it is the fresh result of an operation that does not keep it
            for its backward.
    """
    if not x.is_contiguous():
        x, owned = x.contiguous(), True
    # Autograd keeps track of overwritten views at the price of copies, so a view gains nothing; a
    # compiler removes copies by itself, and cannot follow an overwritten input.
    if (
        owned
        and not torch.compiler.is_compiling()
        and not collectives_are_functional()
        and not x._is_view()
    ):
        return _ReduceInPlace.apply(x, group)
    return _Reduce.apply(x, group)


def gather_from_region(
    x: Tensor, group: dist.ProcessGroup, *, dim: int = -1, sizes: Sequence[int]
) -> Tensor:
    """The shards of all ranks side by side along `dim`, by one all-gather.

    Args:
        sizes: the size along `dim` on each rank of the group; unequal ones are padded on the way.
    """
    return _Gather.apply(x, group, dim, tuple(sizes))


def split_to_region(
    x: Tensor, group: dist.ProcessGroup, *, dim: int = -1, sizes: Sequence[int]
) -> Tensor:
    """This rank's slice of `x` along `dim`; the gradients of all slices are gathered by one
    all-gather.

    Args:
        sizes: the size along `dim` on each rank of the group; they add up to that of `x`.
    """
    return _Split.apply(x, group, dim, tuple(sizes))


def gather_tokens(part: Tensor, length: int, group: dist.ProcessGroup) -> Tensor:
    """The parts (batch, part, ...) of all ranks side by side: (batch, length, ...), by one
    all-gather. Not differentiable."""
    ranks = dist.get_world_size(group)
    part = part.contiguous()
    if torch.compiler.is_compiling():
        whole = functional_gather(part, group)
    else:
        whole = part.new_empty((ranks * part.shape[0], *part.shape[1:]))
        all_gather_flat(whole, part, group).wait()
        received("all-gather", whole)
    # (ranks * batch, part, ...) -> (batch, ranks * part, ...): a copy unless the batch is one row.
    whole = whole.unflatten(0, (ranks, part.shape[0])).transpose(0, 1).flatten(1, 2)
    return whole if whole.shape[1] == length else whole[:, :length]


def scatter_tokens(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part (batch, part, ...) of the sum of `whole` (batch, length, ...) over the
    group, by one reduce-scatter.

    Tokens beyond the length are zeros. Not differentiable.
    """
    ranks = dist.get_world_size(group)
    whole = _padded(whole, ranks).unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1)
    if torch.compiler.is_compiling() or collectives_are_functional():
        return functional_scatter_sum(whole.contiguous(), group)
    part = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    reduce_scatter_flat(part, whole.contiguous(), group).wait()
    received("reduce-scatter", part)
    return part


def part_of_tokens(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of the tokens of `whole` (batch, length, ...), padded with zeros. No
    communication."""
    return (
        _padded(whole, dist.get_world_size(group))
        .chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
        .contiguous()
    )


def _padded(whole: Tensor, ranks: int) -> Tensor:
    missing = -whole.shape[1] % ranks
    return (
        whole
        if missing == 0
        else torch.cat([whole, whole.new_zeros((whole.shape[0], missing, *whole.shape[2:]))], dim=1)
    )


def _all_reduced(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `x` over the group, in new memory."""
    if torch.compiler.is_compiling() or collectives_are_functional():
        return functional_sum(x.contiguous(), group)
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_flat(total, group)
    return total


def _slice(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
    rank = dist.get_rank(group)
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous()


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: tuple[int, ...]) -> Tensor:
    dim = dim % x.ndim
    longest = max(sizes)
    if x.shape[dim] < longest:
        padding = list(x.shape)
        padding[dim] = longest - x.shape[dim]
        x = torch.cat([x, x.new_zeros(padding)], dim)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        gathered = functional_gather(x, group).unflatten(0, (len(sizes), -1))
    else:
        gathered = x.new_empty((len(sizes), *x.shape))
        all_gather_flat(gathered.flatten(0, 1), x, group).wait()
        received("all-gather", gathered)
    return torch.cat(
        [part.narrow(dim, 0, size) for part, size in zip(gathered, sizes, strict=True)], dim
    )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owned: bool) -> Tensor:
        ctx.group, ctx.owned = group, owned
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not ctx.owned or not gradient.is_contiguous() or torch.compiler.is_compiling():
            return _all_reduced(gradient, ctx.group), None, None
        all_reduce_flat(gradient, ctx.group)
        return gradient, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        all_reduce_flat(x, group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: tuple[int, ...]
    ) -> Tensor:
        ctx.layout = (group, dim, sizes)
        return _all_gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _slice(gradient, *ctx.layout), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: tuple[int, ...]
    ) -> Tensor:
        ctx.layout = (group, dim, sizes)
        return _slice(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_gather(gradient, *ctx.layout), None, None, None
