"""Lightning's Trainer as the loop around an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision

from lightning_3d.compat.lightning_data import batches_to_come, evaluation_place
from lightning_3d.engine.loop import BatchOrigin


class TrainerLoop:
    """Answers an engine from the Trainer of a module, which may be another one in a second fit. See
    `engine.loop.Loop`."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module

    @property
    def steps(self) -> int:
        return self._module.trainer.global_step

    @property
    def accumulates(self) -> int:
        return self._module.trainer.accumulate_grad_batches

    @property
    def learning_rate(self) -> float:
        return float(self._module.trainer.optimizers[0].param_groups[0]["lr"])

    def origin(self, hook: str) -> BatchOrigin:
        trainer = self._module.trainer
        if hook == "training":
            loader, index = trainer.train_dataloader, trainer.fit_loop.batch_idx
        elif hook == "predict":
            loader, index = None, 0
        else:
            loader, index = evaluation_place(trainer)
        return BatchOrigin(loader, index, batches_to_come(trainer))

    @contextmanager
    def quietly(self) -> Iterator[None]:
        trainer = self._module.trainer
        loggers = trainer.loggers
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers


def step_context(precision: Precision, hook: str) -> AbstractContextManager[Any]:
    """Make the context of Lightning's precision plugin for one call of the user's step."""
    names = {
        "training": "train_step_context",
        "validation": "val_step_context",
        "test": "test_step_context",
    }
    context: AbstractContextManager[Any] = getattr(
        precision, names.get(hook, "predict_step_context")
    )()
    return context
