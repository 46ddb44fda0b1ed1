"""Holds a model as a LightningModule with `self.model` does, so that checkpoints of both have the
same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Step = Callable[[nn.Module, Any], Any]
"""Function of a model and a micro-batch that returns a loss, or a mapping with the key "loss"; in a
forward anything."""


class ModelHolder(nn.Module):
    """The root of a model that has no steps of its own.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, step: Step) -> Any:
        """Compute the loss of a micro-batch."""
        return step(self.model, batch)

    def predict_step(self, batch: Any, step: Step) -> Any:
        """Compute what a forward without gradients is asked for."""
        return step(self.model, batch)


def loss_of_model(model: nn.Module, batch: Any) -> Any:
    """The default step: the loss that a model of Transformers computes from "labels" in the
    batch."""
    return model(**batch).loss


def logits_of_model(model: nn.Module, batch: Any) -> Any:
    """The default step of a forward: the logits of a model of Transformers."""
    return {"logits": model(**batch).logits}
