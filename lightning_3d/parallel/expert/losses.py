"""Losses of a router's decisions and capacity of experts. Functions of tensors; n tokens, k experts
for each, E experts in all."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor


def tokens_per_expert(chosen: Tensor, experts: int) -> Tensor:
    """Number of pairs in `chosen` (n, k) that belong to each expert: (E,), float64."""
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    flat = chosen.reshape(-1)
    return counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int64)).to(torch.float64)


def balancing_loss(scores: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Load-balancing loss of one layer and one micro-batch: E * sum over experts of f * P, where f
    is an expert's share of all tokens and P the mean of its scores.

    The Switch Transformer's loss (arXiv:2101.03961, equations 4 to 6) with k choices of each token
    counted, as Transformers does: k for an even load.

    Args:
        scores: (n, E), each row of sum 1. If the tokens are on several ranks, only those of this
            rank: the sum over the ranks is the loss.
        counts: `tokens_per_expert` of all tokens of the micro-batch.
        rows: number of these tokens, at least 1.
    """
    shares = (counts / rows).to(scores.dtype)
    return len(counts) * (shares * scores.sum(0) / rows.to(scores.dtype)).sum()


def z_loss(logits: Tensor, rows: Tensor) -> Tensor:
    """Mean over tokens of the squared log-sum-exp of their logits (n, E) (ST-MoE, arXiv:2202.08906,
    equation 5); see `balancing_loss`."""
    return torch.logsumexp(logits, -1).square().sum() / rows.to(logits.dtype)


def scores_of(logits: Tensor, *, sigmoid: bool) -> Tensor:
    """Scores of the experts, a distribution over them: softmax, or sigmoids divided by their sum
    (DeepSeek-V3)."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if not sigmoid:
        return wide.softmax(-1)
    scores = wide.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def fits(chosen: Tensor, experts: int, factor: float) -> Tensor:
    """Mask of the pairs in `chosen` (n, k) that an expert has room for: (n, k), bool.

    It takes ceil(factor * n * k / E): first choices of all tokens in their order, then second ones
    (GShard, arXiv:2006.16668, algorithm 1).
    """
    rows, choices = chosen.shape
    room = ceil(factor * rows * choices / experts)
    in_turn, order = torch.sort(chosen.t().reshape(-1), stable=True)
    first = torch.searchsorted(in_turn, in_turn)  # where the run of this expert begins
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first
    return (place < room).view(choices, rows).t()


class _Attached(torch.autograd.Function):
    """`carrier` itself; the backward that reaches it also goes into `loss`, with a gradient of its
    own."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.saved_tensors[0], None


def attach(carrier: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
    """Return `carrier` with `weight * loss` attached: when the gradient of `carrier` is computed,
    that of `weight * loss` is computed too.

    Args:
        loss: value of shape ().
        weight: factor of shape ().
    """
    return _Attached.apply(carrier, loss, weight.detach().to(loss.dtype))
