"""Direct preference optimization (DPO) as an ordinary LightningModule.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
arXiv:2305.18290.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.app.training.module import CausalLM


class PreferenceLM(CausalLM):
    """LightningModule that trains a pretrained causal LM to prefer chosen answers to rejected ones.

    A batch has `input_ids` and `labels` of the prompts with the chosen answers, and `rejected_ids`
    and `rejected_labels` of the same prompts with the rejected ones, all (batch, sequence); labels
    of prompts are -100. The reference is a frozen copy of the pretrained model. Logs `loss` and
    `val_loss`, in nats per pair (log 2 before the first step), and `accuracy`: the share of pairs
    in which the model prefers the chosen answer more than the reference does.

    Args:
        model: see `CausalLM`. Without `pretrained`, model and reference have new weights, which
            differ.
        optimizer: see `CausalLM`.
        beta: how strongly the model is kept near the reference.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None = None,
        *,
        beta: float = 0.1,
    ) -> None:
        super().__init__(model, optimizer)
        self.beta = beta
        self.save_hyperparameters({"beta": beta})
        self.reference: Any = None

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        self.reference = self.frozen_model(self.config, self.model_config.get("pretrained"))

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        margins = self._margins(batch)
        loss = -F.logsigmoid(self.beta * margins).mean()
        self.log("loss", loss)
        self.log("accuracy", (margins > 0).double().mean())
        return loss

    @override
    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return -F.logsigmoid(self.beta * self._margins(batch)).mean()

    def _margins(self, batch: dict[str, Tensor]) -> Tensor:
        """How much more than the reference the model prefers the chosen answer, in nats;
        (batch,)."""
        chosen, rejected = (
            (batch["input_ids"], batch["labels"]),
            (batch["rejected_ids"], batch["rejected_labels"]),
        )
        with torch.no_grad():
            expected = log_probability(self.reference, *chosen) - log_probability(
                self.reference, *rejected
            )
        return (
            log_probability(self.model, *chosen) - log_probability(self.model, *rejected) - expected
        )


def log_probability(model: Any, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of the target tokens of each sequence, (batch,)."""
    logits = model(input_ids=input_ids).logits[:, :-1]
    targets = labels[:, 1:]
    each = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (each * (targets != IGNORE_INDEX)).sum(-1)
