"""A causal language model that gives log-probabilities of texts and the logits of the next token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.training.data.packing import IGNORE_INDEX
from lightning_3d.training.module import CausalLM


class ScoredLM(CausalLM):
    """`CausalLM` whose predictions are scores of rows, or logits of next tokens."""

    @override
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int = 0) -> Tensor:
        """Score the targets of each row, or compute the logits after its last token.

        Args:
            batch: `input_ids`, (rows, sequence), and either `labels`, equal to them at targets and -100 elsewhere, or `last`, (rows,), the
                place of the last token of each row. What follows that place is padding, which causal attention never sees.

        Returns:
            (rows, 2) of float64 for labels: the log-probability of the targets, and 1.0 where each of them is the most probable token.
            (rows, vocabulary) for `last`.
        """
        logits: Any = self.model(input_ids=batch["input_ids"]).logits
        if "last" in batch:
            return logits[torch.arange(len(batch["last"]), device=batch["last"].device), batch["last"]]
        return score_rows(logits[:, :-1], batch["labels"][:, 1:])


def score_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Return (rows, 2) of float64 for logits (rows, length, vocabulary) and targets (rows, length), see `ScoredLM.predict_step`.

    The log-softmax is computed in float32 or wider.
    """
    counted = targets != IGNORE_INDEX
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    chosen = wide.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    total = torch.where(counted, chosen.double(), 0.0).sum(-1)
    greedy = ((wide.argmax(-1) == targets) | ~counted).all(-1)
    return torch.stack([total, greedy.double()], -1)
