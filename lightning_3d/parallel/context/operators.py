"""Attention to the keys of all ranks, with gradients: as a function of autograd, and as one
operator in the graph of a compiled block.

A compiler cannot look into the operator: its messages between ranks and its tiles, of which there
are more in one batch than in another, run as they do without a compiler. The graph does not end at
the attention. Operators take tensors and numbers only, so a mask is taken apart in front of the
operator and put together in it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.compat.torch import group_of_name
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.kernels import Scores, wide
from lightning_3d.parallel.context.masks import Mask
from lightning_3d.parallel.context.ring import Course, attend_around, attend_around_backward


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scores: Scores,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks. Messages, arguments and result:
    see `ring.attend_around`."""
    return _attention(query, key, value, mask, scores, sinks, around=True)


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scores: Scores,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with all tokens, in the order of the sequence, on one rank."""
    return _attention(query, key, value, mask, scores, sinks, around=False)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scores: Scores,
    sinks: Tensor | None,
    *,
    around: bool,
) -> Tensor:
    if not torch.compiler.is_compiling():
        return _Attention.apply(query, key, value, sinks, _course(mask, scores, around))
    documents, padding, group = mask.documents, mask.padding, mask.context.group.group_name
    numbers = (mask.length, mask.window, scores.scale, scores.softcap)
    out, _ = context_attention(
        query, key, value, sinks, documents, padding, *numbers, group, around
    )
    return out


def _course(mask: Mask, scores: Scores, around: bool) -> Course:
    return Course.around(mask, scores) if around else Course.of_one(mask, scores)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, course: Course
    ) -> Tensor:
        out, lse = attend_around(query, key, value, sinks, course)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.course = course
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        return (
            *attend_around_backward(grad_out, query, key, value, sinks, out, lse, ctx.course),
            None,
        )


@torch.library.custom_op("lightning_3d::context_attention", mutates_args=())
def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    documents: Tensor | None,
    padding: Tensor | None,
    length: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    group: str,
    around: bool,
) -> tuple[Tensor, Tensor]:
    """The operator: `attend_around`, with the attributes of a `Mask` and of `Scores`, and the name
    of the group."""
    mask = _mask(documents, padding, length, window, group)
    return attend_around(query, key, value, sinks, _course(mask, Scores(scale, softcap), around))


@context_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


@torch.library.custom_op("lightning_3d::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    padding: Tensor | None,
    length: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    group: str,
    around: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the operator; that of `sinks` is empty where there are none."""
    mask = _mask(documents, padding, length, window, group)
    course = _course(mask, Scores(scale, softcap), around)
    of_query, of_key, of_value, of_sinks = attend_around_backward(
        grad_out, query, key, value, sinks, out, lse, course
    )
    # Results of an operator must not share memory, as the gradients of keys and values do, which
    # arrive in one message; and they must have the strides of the fake ones.
    return (
        of_query.contiguous(),
        of_key.clone(),
        of_value.clone(),
        query.new_empty(0) if of_sinks is None else of_sinks,
    )


@context_attention_backward.register_fake
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *others: Any
) -> tuple[Tensor, ...]:
    found = [x.new_empty(x.shape) for x in (query, key, value)]
    return *found, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, sinks, documents, padding, *ctx.others = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, documents, padding)


def _differentiate(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *found, of_sinks = context_attention_backward(grad_out, *ctx.saved_tensors, *ctx.others)
    return *found, of_sinks if ctx.needs_input_grad[3] else None, *[None] * (2 + len(ctx.others))


context_attention.register_autograd(_differentiate, setup_context=_keep)


def _mask(
    documents: Tensor | None, padding: Tensor | None, length: int, window: int | None, group: str
) -> Mask:
    if documents is None and padding is None:
        return _new_mask(None, None, length, window, group)
    return _mask_of_batch(documents, padding, length, window, group)


def _new_mask(
    documents: Tensor | None, padding: Tensor | None, length: int, window: int | None, group: str
) -> Mask:
    ranks = group_of_name(group)
    context = ContextParallel(ranks, ranks.size(), dist.get_rank(ranks))
    return Mask(context, length, documents=documents, padding=padding, window=window)


_mask_of_batch = lru_cache(maxsize=16)(_new_mask)
"""A mask notes which parts of the scores count in a batch, for all layers and the backward. Tensors
are found by their identity."""


def forget_masks() -> None:
    """Release the masks of a batch whose backward has ended, with their tensors and process
    groups."""
    _mask_of_batch.cache_clear()


def known_masks() -> int:
    """Number of masks that are kept now."""
    return _mask_of_batch.cache_info().currsize
