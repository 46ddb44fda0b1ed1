"""One step as the user wrote it, run over micro-batches: cutting the batch, weighting the loss, collecting what was logged."""

from lightning_3d.step.batches import MicroBatches, cut_batch, repeated_rows
from lightning_3d.step.runner import StepResult, StepRunner
from lightning_3d.step.weighting import LossWeights, TokenMeanLoss

__all__ = ["LossWeights", "MicroBatches", "StepResult", "StepRunner", "TokenMeanLoss", "cut_batch", "repeated_rows"]
