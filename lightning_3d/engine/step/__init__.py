"""Runs the user's step over micro-batches: splitting the batch, weighting the loss, collecting what
was logged."""

from lightning_3d.engine.step.loss_weights import LossWeights, TokenMeanLoss
from lightning_3d.engine.step.micro_batches import (
    MicroBatches,
    repeated_rows,
    split_into_micro_batches,
)
from lightning_3d.engine.step.runner import StepResult, StepRunner

__all__ = [
    "LossWeights",
    "MicroBatches",
    "StepResult",
    "StepRunner",
    "TokenMeanLoss",
    "split_into_micro_batches",
    "repeated_rows",
]
