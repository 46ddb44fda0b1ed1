"""Losses of tokens from logits, sharded by vocabulary or whole."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.options.loss import CROSS_ENTROPY, LossOptions
from lightning_3d.parallel.deferred_logits import DeferredLogits, computed, summed_loss
from lightning_3d.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy, wide
from lightning_3d.parallel.tensor.logits import VocabParallelLogits

__all__ = ["summed_losses", "token_losses", "vocab_parallel_cross_entropy"]


def summed_losses(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, terms: LossOptions = CROSS_ENTROPY
) -> Tensor:
    """Sum of `token_losses`, shape (). Logits that are deferred and that nothing has read are
    computed in chunks, which also means two small all-reduces over tp for each chunk."""
    local = logits.local if isinstance(logits, VocabParallelLogits) else logits
    if not isinstance(local, DeferredLogits) or local.was_read:
        return token_losses(logits, labels, ignore_index, terms).sum()
    if isinstance(logits, VocabParallelLogits):
        shard = logits
        return summed_loss(
            local,
            labels,
            lambda part, targets: token_losses(shard.like(part), targets, ignore_index, terms),
        )
    return summed_loss(local, labels, partial(token_losses, ignore_index=ignore_index, terms=terms))


def token_losses(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, terms: LossOptions = CROSS_ENTROPY
) -> Tensor:
    """Cross-entropy of every token and further terms (`LossOptions`), (...) for logits (...,
    vocabulary) and labels (...); 0 where these are ignored.

    float32, or float64 for float64 logits. For `VocabParallelLogits` two small all-reduces over tp,
    see `vocab_parallel_cross_entropy`; none otherwise.
    """
    if isinstance(logits, VocabParallelLogits):
        return vocab_parallel_cross_entropy(
            computed(logits.local),
            labels,
            logits.vocab_offset,
            logits.context.group,
            ignore_index,
            terms=terms,
            vocabulary=logits.vocabulary,
        )
    logits = computed(logits)
    scores = logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype))
    targets = labels.reshape(-1)
    losses = F.cross_entropy(
        scores,
        targets,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=terms.label_smoothing,
    )
    if terms.z_loss:
        losses = losses + terms.z_loss * scores.logsumexp(-1).square().masked_fill(
            targets == ignore_index, 0.0
        )
    return losses.view(labels.shape)
