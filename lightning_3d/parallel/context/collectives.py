"""Communication between context-parallel ranks.

                        forward                       backward
    gather_sequence       all-gather                    reduce-scatter   parts of a sequence -> the whole one, in order
    sum_over_ranks        all-reduce                    all-reduce       numbers
    sequence_to_heads     all-to-all                    all-to-all       all heads of some tokens -> some heads of all tokens
    heads_to_sequence     all-to-all                    all-to-all       and back
    Ring.pass_on          to the next rank, from the previous one

The first two end the sharded region: afterwards all ranks have the same values. Each rank computes
only a share of the loss, so their gradients are summed. All ranks call the same functions in the
same order, with the same shapes.
"""  # noqa: E501

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.compat.torch import (
    functional_all_to_all,
    functional_gather,
    functional_scatter_sum,
)
from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.zigzag import natural_order
from lightning_3d.parallel.witness import received, sent


def gather_sequence(x: Tensor, context: ContextParallel) -> Tensor:
    """(batch, seq / cp, ...) on each rank -> (batch, seq, ...) in the order of the sequence, on
    all."""
    return _Gather.apply(x, context)


def sum_over_ranks(x: Tensor, context: ContextParallel) -> Tensor:
    """The sum of a few numbers over the ranks."""
    return _Sum.apply(x, context)


def sequence_to_heads(x: Tensor, context: ContextParallel) -> Tensor:
    """(batch, heads, seq / cp, width) -> (batch, heads / cp, seq, width), tokens in the order of
    the sequence; cp divides the heads."""
    return _ToHeads.apply(x, context)


def heads_to_sequence(x: Tensor, context: ContextParallel) -> Tensor:
    """(batch, heads / cp, seq, width) -> (batch, heads, seq / cp, width)."""
    return _ToSequence.apply(x, context)


class Ring:
    """Ring of ranks: sends messages to the next rank, and receives messages of the same shapes from
    the previous one."""

    def __init__(self, context: ContextParallel) -> None:
        self._group = context.group
        ranks = dist.get_process_group_ranks(context.group)
        self._next = ranks[(context.rank + 1) % context.size]
        self._previous = ranks[(context.rank - 1) % context.size]

    def pass_on(self, tensor: Tensor, tag: int = 0) -> Passing:
        """Start to send a contiguous tensor, which must not change until it is sent, and to receive
        one of the same shape."""
        arriving = torch.empty_like(tensor)
        sent("message of the ring", tensor)
        works = exchange.send_and_receive(
            tensor, self._next, arriving, self._previous, self._group, tag
        )
        return Passing(tensor, arriving, works)


class Passing:
    """A message in flight."""

    def __init__(self, sent: Tensor, received: Tensor, works: list[dist.Work]) -> None:
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """Wait for all messages; return what was received."""
        for work in self._works:
            work.wait()
        received("message of the ring", self._received)
        return self._received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        parts = _all_gather(x.transpose(0, 1).contiguous(), context)
        # The copy into the order of the sequence also makes (batch, seq) contiguous: losses call
        # `view` on logits.
        return parts.transpose(0, 1).index_select(
            1, natural_order(len(parts), context.size, x.device)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        context: ContextParallel = ctx.context
        by_rank = torch.empty_like(gradient.transpose(0, 1), memory_format=torch.contiguous_format)
        by_rank[natural_order(gradient.shape[1], context.size, gradient.device)] = (
            gradient.transpose(0, 1)
        )
        return _reduce_scatter(by_rank, context).transpose(0, 1), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        total = x.clone()
        sent("all-reduce", total)
        exchange.sum_now(total, context.group)
        received("all-reduce", total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = gradient.clone(memory_format=torch.contiguous_format)
        sent("all-reduce", total)
        exchange.sum_now(total, ctx.context.group)
        received("all-reduce", total)
        return total, None


def _all_gather(own: Tensor, context: ContextParallel) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_gather(own, context.group)
    parts = own.new_empty((context.size * own.shape[0], *own.shape[1:]))
    sent("all-gather", own)
    exchange.gather_now(parts, own, context.group)
    received("all-gather", parts)
    return parts


def _reduce_scatter(by_rank: Tensor, context: ContextParallel) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_scatter_sum(by_rank, context.group)
    own = by_rank.new_empty((len(by_rank) // context.size, *by_rank.shape[1:]))
    sent("reduce-scatter", by_rank)
    exchange.scatter_sum_now(own, by_rank, context.group)
    received("reduce-scatter", own)
    return own


def _all_to_all(by_rank: Tensor, context: ContextParallel) -> Tensor:
    if torch.compiler.is_compiling():
        return functional_all_to_all(by_rank, context.group)
    arrived = torch.empty_like(by_rank)
    sent("all-to-all", by_rank)
    exchange.all_to_all(arrived, by_rank, None, None, context.group)
    received("all-to-all", arrived)
    return arrived


def _to_heads(x: Tensor, context: ContextParallel) -> Tensor:
    batch, heads, part, width = x.shape
    by_rank = (
        x.view(batch, context.size, heads // context.size, part, width)
        .permute(1, 3, 0, 2, 4)
        .contiguous()
    )
    tokens = _all_to_all(by_rank, context).flatten(0, 1)  # (seq by rank, batch, heads / cp, width)
    return tokens[natural_order(len(tokens), context.size, x.device)].permute(1, 2, 0, 3)


def _to_sequence(x: Tensor, context: ContextParallel) -> Tensor:
    batch, heads, length, width = x.shape
    by_rank = x.new_empty((length, batch, heads, width))
    by_rank[natural_order(length, context.size, x.device)] = x.permute(2, 0, 1, 3)
    parts = _all_to_all(by_rank, context).view(
        context.size, length // context.size, batch, heads, width
    )
    return parts.permute(2, 0, 3, 1, 4).reshape(
        batch, context.size * heads, length // context.size, width
    )


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return _to_heads(x.contiguous(), context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _to_sequence(gradient, ctx.context), None


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return _to_sequence(x, context)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _to_heads(gradient.contiguous(), ctx.context), None
