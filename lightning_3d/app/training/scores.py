"""Scores of rows of tokens, from the logits of a causal language model."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_3d.app.training.data.documents import IGNORE_INDEX


def score_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Score rows of tokens. The log-softmax is computed in float32 or wider.

    Args:
        logits: (rows, sequence, vocabulary).
        targets: (rows, sequence).

    Returns:
        (rows, 2) of float64: the log-probability of the targets, and 1.0 where each of them is the
            most probable token.
    """
    counted = targets != IGNORE_INDEX
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = scores.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = torch.where(counted, chosen.double(), 0.0).sum(-1)
    greedy = ((scores.argmax(-1) == targets) | ~counted).all(-1)
    return torch.stack([total, greedy.double()], -1)
