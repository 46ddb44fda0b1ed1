"""Losses of tokens from logits, sharded by vocabulary or whole."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy, wide
from lightning_3d.parallel.tensor.logits import VocabParallelLogits

__all__ = ["token_losses", "vocab_parallel_cross_entropy"]


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Cross-entropy of every token, (...) for logits (..., vocabulary) and labels (...); 0 where these are ignored.

    float32, or float64 for float64 logits. For `VocabParallelLogits` two small all-reduces over tp, see
    `vocab_parallel_cross_entropy`; none otherwise.
    """
    if isinstance(logits, VocabParallelLogits):
        return vocab_parallel_cross_entropy(
            logits.local, labels, logits.vocab_offset, logits.context.group, ignore_index
        )
    scores = logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype))
    losses = F.cross_entropy(scores, labels.reshape(-1), ignore_index=ignore_index, reduction="none")
    return losses.view(labels.shape)
