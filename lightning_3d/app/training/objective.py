"""The LightningModule of a run, by its objective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_3d.app.config.objective import (
    DISTILLATION,
    DPO,
    ObjectiveOptions,
    require_same_vocabulary,
)
from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.app.training.document_inputs import inputs_of
from lightning_3d.app.training.module import CausalLM, transformers_config
from lightning_3d.app.training.preference import PreferenceLM
from lightning_3d.models.pretrained_config import architecture
from lightning_3d.models.safetensors_folder import find_folder


def make_module(config: Mapping[str, Any], teacher: Mapping[str, Any] | None = None) -> CausalLM:
    """Build the module that the groups `model` and `optimizer` and the keys `objective` describe.

    Args:
        teacher: `model_type` and fields of a teacher with new weights, in place of the folder
            `objective.teacher`.
    """
    options = ObjectiveOptions(**config.get("objective", {}))
    if options.name == DPO:
        return PreferenceLM(config["model"], config["optimizer"], beta=options.beta)
    if options.name == DISTILLATION:
        second = options.teacher if teacher is None else teacher
        assert second is not None
        more = {"temperature": options.temperature, "teacher_weight": options.teacher_weight}
        return DistilledLM(config["model"], config["optimizer"], teacher=second, **more)
    return CausalLM(config["model"], config["optimizer"])


# Distillation from a larger causal LM as an ordinary LightningModule.
# Hinton et al., "Distilling the Knowledge in a Neural Network", arXiv:1503.02531.


class DistilledLM(CausalLM):
    """LightningModule that trains a causal LM to predict the next token as the data and a frozen
    teacher do.

    Logs `loss`, the weighted sum of both parts in nats per target token, and `cross_entropy` and
    `val_loss`, which are the data's part.

    Args:
        model: see `CausalLM`.
        optimizer: see `CausalLM`.
        teacher: folder of a pretrained causal LM with the same vocabulary, or its `model_type` and
            the fields of its Transformers configuration: then it has new weights.
        temperature: temperature of both distributions in the teacher's part, which is multiplied by
            its square.
        teacher_weight: weight of the teacher's part, 0 to 1.

    Raises:
        ConfigError: the teacher has another vocabulary size.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        optimizer: Mapping[str, Any] | None = None,
        *,
        teacher: str | Mapping[str, Any],
        temperature: float = 2.0,
        teacher_weight: float = 0.5,
    ) -> None:
        super().__init__(model, optimizer)
        self.save_hyperparameters(
            {"teacher": teacher, "temperature": temperature, "teacher_weight": teacher_weight}
        )
        self.temperature, self.teacher_weight = temperature, teacher_weight
        if isinstance(teacher, str):
            self.teacher_folder: Path | None = find_folder(teacher)
            fields = architecture(self.teacher_folder)
        else:
            self.teacher_folder, fields = None, dict(teacher)
        self.teacher_config = transformers_config(fields, known=fields)
        name = f"={teacher}" if isinstance(teacher, str) else ""
        require_same_vocabulary(name, self.teacher_config.vocab_size, self.config.vocab_size)
        self.teacher: Any = None

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        self.teacher = self.frozen_model(self.teacher_config, self.teacher_folder)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            expected = self.teacher(**inputs_of(batch, self.teacher)).logits
        output = self.model(**inputs_of(batch, self.model), labels=batch["labels"])
        softened = divergence(output.logits, expected, batch["labels"], self.temperature)
        loss = (1 - self.teacher_weight) * output.loss + self.teacher_weight * softened
        self.log("loss", loss)
        self.log("cross_entropy", output.loss)
        return loss


def divergence(logits: Tensor, expected: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence from the teacher's distribution, mean over target tokens, times
    the squared temperature; shape ().

    Args:
        logits: of the model, (batch, sequence, vocabulary).
        expected: of the teacher, same shape.
        labels: (batch, sequence); -100 marks what is not a target.
    """
    found, wanted = ((each[:, :-1] / temperature).log_softmax(-1) for each in (logits, expected))
    each = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    targets = labels[:, 1:] != IGNORE_INDEX
    return temperature**2 * (each * targets).sum() / targets.sum().clamp(min=1)
