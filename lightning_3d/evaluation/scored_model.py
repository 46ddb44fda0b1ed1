"""A causal language model that gives log-probabilities of tokens and the logits of the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.training.data.documents import IGNORE_INDEX
from lightning_3d.training.module import CausalLM


class ScoredLM(CausalLM):
    """`CausalLM` whose predictions are scores of rows, or logits of next tokens."""

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        """Score the targets of each row, or compute the logits after its last token.

        Args:
            batch: `input_ids`, (rows, sequence), and either `targets`, (rows, sequence), the token that each position predicts (-100: not
                counted), or `last`, (rows,), the place of the last token of each row. What follows these places is padding, which causal
                attention never sees.

        Returns:
            (rows, 2) of float64 for targets, see `score_rows`; (rows, vocabulary) for `last`.
        """
        logits: Any = self.model(input_ids=batch["input_ids"]).logits
        if "targets" in batch:
            return score_rows(logits, batch["targets"])
        last = batch["last"]
        return logits[torch.arange(len(last), device=last.device), last]


def score_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Score rows of tokens. The log-softmax is computed in float32 or wider.

    Args:
        logits: (rows, sequence, vocabulary).
        targets: (rows, sequence).

    Returns:
        (rows, 2) of float64: the log-probability of the targets, and 1.0 where each of them is the most probable token.
    """
    counted = targets != IGNORE_INDEX
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = scores.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = torch.where(counted, chosen.double(), 0.0).sum(-1)
    greedy = ((scores.argmax(-1) == targets) | ~counted).all(-1)
    return torch.stack([total, greedy.double()], -1)
