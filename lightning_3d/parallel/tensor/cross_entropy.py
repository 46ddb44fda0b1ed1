"""Cross-entropy of logits that are sharded by vocabulary, without ever gathering a full row."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.compat.torch import assert_on_device
from lightning_3d.errors import DataError
from lightning_3d.options.loss import CROSS_ENTROPY, LossOptions
from lightning_3d.parallel.collectives import all_reduce_flat


def vocab_parallel_cross_entropy(
    local_logits: Tensor,
    targets: Tensor,
    vocab_offset: int,
    group: dist.ProcessGroup,
    ignore_index: int = -100,
    *,
    terms: LossOptions = CROSS_ENTROPY,
    vocabulary: int = 0,
) -> Tensor:
    """Loss of every token, as `F.cross_entropy(..., reduction="none")` of the full logits gives it,
    and further terms.

    Two all-reduces of two numbers per token over `group`, of three with label smoothing, none
    backward (Megatron-LM, Shoeybi et al. 2019, section 3).

    Args:
        local_logits: (..., local vocabulary), this rank's columns.
        targets: (...), token ids of the full vocabulary, the same on all ranks. `ignore_index`
            gives a loss of 0.
        vocab_offset: first column of this rank.
        terms: see `LossOptions`.
        vocabulary: columns of all ranks, which label smoothing needs.

    Returns:
        (...), float32, or float64 for float64 logits.

    Raises:
        DataError: an id that no rank holds, on all ranks; on CUDA an assertion of the device, which
            does not wait for it.
    """
    shares = _Shares(
        1 - terms.label_smoothing,
        terms.label_smoothing / vocabulary if terms.label_smoothing else 0.0,
        terms.z_loss,
    )
    return _CrossEntropy.apply(local_logits, targets, vocab_offset, group, ignore_index, shares)


class _Shares(NamedTuple):
    """Factors of the terms of a loss: of the target's score, of every score, and of the squared
    log-sum-exp."""

    target: float
    each: float
    z: float


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which a loss is computed."""
    return torch.promote_types(dtype, torch.float32)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that keeps the logits and one number per token for the backward, not the
    softmax."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_offset: int,
        group: dist.ProcessGroup,
        ignore_index: int,
        shares: _Shares,
    ) -> Tensor:
        scores = logits.to(wide(logits.dtype))
        local, mine = _locate(targets, vocab_offset, logits.shape[-1])
        extremes = torch.stack([scores.amax(-1), mine.to(scores.dtype)])
        all_reduce_flat(extremes, group, dist.ReduceOp.MAX)
        highest, is_held = extremes

        # Like log_softmax, subtract the highest score before the exponential, and also from the
        # score of the target.
        shifted = scores - highest.unsqueeze(-1)
        target_score = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        # The scores of the target distribution: subtracting the highest changes none of the terms,
        # because its shares add up to 1.
        every = [shifted.sum(-1)] if shares.each else []
        sums = torch.stack([shifted.exp_().sum(-1), target_score, *every])
        all_reduce_flat(sums, group)

        log_total, target_score = sums[0].log(), sums[1]
        _require_held((is_held > 0) | (targets == ignore_index), targets)
        log_sum_exp = highest + log_total
        losses = log_total - shares.target * target_score
        if shares.each:
            losses = losses - shares.each * sums[2]
        if shares.z:
            losses = losses + shares.z * log_sum_exp.square()
        ctx.save_for_backward(logits, targets, log_sum_exp)
        ctx.vocab_offset, ctx.ignore_index, ctx.shares = vocab_offset, ignore_index, shares
        return losses.masked_fill(targets == ignore_index, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, targets, log_sum_exp = ctx.saved_tensors
        local, mine = _locate(targets, ctx.vocab_offset, logits.shape[-1])
        shares = ctx.shares
        # the probabilities
        of_logits = (logits.to(log_sum_exp.dtype) - log_sum_exp.unsqueeze(-1)).exp_()
        if shares.z:
            of_logits.mul_((1 + 2 * shares.z * log_sum_exp).unsqueeze(-1))
        if shares.each:
            of_logits.sub_(shares.each)
        of_logits.scatter_add_(
            -1, local.unsqueeze(-1), -shares.target * mine.to(of_logits.dtype).unsqueeze(-1)
        )
        gradient = gradient.masked_fill(targets == ctx.ignore_index, 0.0)
        return of_logits.mul_(gradient.unsqueeze(-1)).to(logits.dtype), None, None, None, None, None


def _require_held(known: Tensor, targets: Tensor) -> None:
    """Refuse targets outside the vocabulary."""
    if known.is_cuda:
        assert_on_device(known.all(), "a label is outside the vocabulary")
    elif not known.all():
        place = (~known).nonzero()[0].tolist()
        raise DataError(
            f"The label {int(targets[tuple(place)])} at position {place} is outside the model's"
            " vocabulary. Use the model's own tokenizer."
        )


def _locate(targets: Tensor, vocab_offset: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of each target on this rank, 0 where it is elsewhere; whether it is here)."""
    local = targets - vocab_offset
    mine = (local >= 0) & (local < columns)
    return local.masked_fill(~mine, 0), mine
