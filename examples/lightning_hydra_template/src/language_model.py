"""A language model of Transformers as an ordinary LightningModule."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor


class LanguageModule(LightningModule):
    """Next-token prediction.

    Args:
        net: model that returns the loss for `labels`, such as a causal language model of
            Transformers.
        optimizer: function from parameters to their optimizer.
        scheduler: function from an optimizer to its learning-rate schedule, which steps with every
            batch.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler],
    ) -> None:
        super().__init__()
        self.net = net
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(
            "val/loss", self.net(input_ids=batch, labels=batch).loss, prog_bar=True, sync_dist=True
        )

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test/loss", self.net(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.make_scheduler(optimizer), "interval": "step"},
        }
