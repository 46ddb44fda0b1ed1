"""The loss of validation sets: exact means over target tokens, whatever the layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import DataError
from lightning_3d.parallel.collectives import all_reduce_flat
from lightning_3d.strategy.strategy import Lightning3DStrategy

ONLY_SET = "validation"
"""Name of the validation set of data that has one without a name."""


@dataclass(frozen=True)
class SetLoss:
    """Loss of one validation set.

    Attributes:
        name: name of the set.
        loss: mean over all its target tokens, in nats.
        tokens: target tokens.
        samples: samples.
    """

    name: str
    loss: float
    tokens: int
    samples: int

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite where it is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def numbers(self) -> dict[str, float]:
        """Return loss, perplexity, tokens and samples by name, for a table or a file."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "tokens": self.tokens,
            "samples": self.samples,
        }


class SetLosses(pl.Callback):
    """Callback that sums the losses of each validation set in float64, over all batches and
    data-parallel ranks.

    It reads what `CausalLM.validation_step` returns. Rows that a sampler repeats, so that ranks
    have equally many, are not in it.

    Attributes:
        results: one entry for each set, the same on every rank, after a validation.
    """

    def __init__(self) -> None:
        self.results: list[SetLoss] = []
        self._sums = torch.zeros(0, 3, dtype=torch.float64)

    @override
    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._sums = torch.zeros(len(self._names(trainer)), 3, dtype=torch.float64)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if outputs is not None:
            loss, tokens, samples = (_number(outputs[key]) for key in ("loss", "tokens", "samples"))
            self._sums[dataloader_idx] += torch.tensor(
                [loss * tokens if tokens else 0.0, tokens, samples], dtype=torch.float64
            )

    @override
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, Lightning3DStrategy)
        sums = self._sums.to(strategy.root_device)
        all_reduce_flat(sums, strategy.mesh.group("dp"))
        self.results = [
            SetLoss(name, total / tokens if tokens else math.nan, int(tokens), int(samples))
            for name, (total, tokens, samples) in zip(
                self._names(trainer), sums.tolist(), strict=True
            )
        ]

    @staticmethod
    def _names(trainer: pl.Trainer) -> tuple[str, ...]:
        return getattr(getattr(trainer, "datamodule", None), "val_names", ()) or (ONLY_SET,)

    def require_results(self) -> list[SetLoss]:
        """Return the results.

        Raises:
            DataError: there was no validation set.
        """
        if not self.results:
            raise DataError(
                "The data has no validation set. Set data.val_path, or a data.val_fraction above 0."
            )
        return self.results


def _number(value: Tensor | float) -> float:
    return float(value.detach().double()) if isinstance(value, Tensor) else float(value)
