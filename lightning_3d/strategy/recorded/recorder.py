"""What the recorders of both kinds of runs have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_3d.compat.lightning_trainer import watch_samples
from lightning_3d.ranks.role import Role
from lightning_3d.strategy.recorded.records import Records, State


class Recorder(pl.Callback):
    """Callback that records a fit, before all other callbacks.

    The state before a batch is read when it begins, because hooks after the step may change weights
    too.
    """

    def __init__(self, role: Role) -> None:
        self.role = role
        self.records = Records()
        self.batch = 0

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._samples = watch_samples()
        move = trainer.strategy.batch_to_device

        def moved(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
            found = move(batch, device, dataloader_idx)
            return self.see_batch(trainer, found) if trainer.training else found

        trainer.strategy.batch_to_device = moved  # type: ignore[method-assign]

    def samples(self, trainer: pl.Trainer) -> list[Any] | None:
        """Indices of the samples of the batch that is read now; None where they are not known."""
        return self._samples(trainer.train_dataloader, self.batch)

    @abstractmethod
    def see_batch(self, trainer: pl.Trainer, batch: Any) -> Any:
        """Record a batch of the training, and return the one to train on."""

    @abstractmethod
    def state(self, trainer: pl.Trainer, module: pl.LightningModule) -> State:
        """Copy weights, optimizer state and buffers."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.records.states.append(self.state(trainer, module))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any
    ) -> None:
        self.batch += 1

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.records.states.append(self.state(trainer, module))
        self.records.save(self.role.own, trainer.global_rank)


def logged_values(trainer: pl.Trainer) -> dict[str, float]:
    """Numbers that the module has logged."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if isinstance(value, Tensor) and value.numel() == 1
    }


def buffers_of(module: pl.LightningModule) -> dict[str, Tensor]:
    """Copies of the buffers of a module."""
    return {
        name: buffer.detach().to("cpu", copy=True)
        for name, buffer in module.named_buffers()
        if not buffer.is_meta
    }


def copied(values: Any) -> dict[str, Tensor | float]:
    """Copies of an optimizer's values for a parameter."""
    kept: dict[str, Tensor | float] = {}
    for key, value in values.items():
        if isinstance(value, Tensor):
            kept[key] = value.detach().to("cpu", copy=True)
        elif isinstance(value, (int, float)):
            kept[key] = float(value)
    return kept
