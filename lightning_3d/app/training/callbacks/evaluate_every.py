"""Callback that validates after every n-th optimizer step, whatever number of batches a step
takes."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_sizes

_NEVER = 2**62
"""More batches than a run has."""


class EvaluateEvery(pl.Callback):
    """Validates after every n-th optimizer step, and after step `max_steps` of the Trainer.

    `val_check_interval` counts batches. With `accumulate_grad_batches` a step has several, and the
    last step of an epoch may have fewer. After each batch, Lightning validates if the number of
    batches is a multiple of `Trainer.val_check_batch`. This callback sets that attribute before: to
    1 where a validation is due, and otherwise to a number that is never reached. A fit that resumes
    reads it too, to count the validation of its checkpoint's step as done.

    Args:
        steps: optimizer steps between validations.

    Raises:
        ConfigError: where a fit begins, if its Trainer validates by time or leaves epochs out.
    """

    def __init__(self, steps: int) -> None:
        check_sizes(steps=steps)
        self.steps = steps
        self._before = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.val_check_batch is None or trainer.check_val_every_n_epoch not in (None, 1):
            raise ConfigError(
                "EvaluateEvery counts optimizer steps, but this Trainer validates by time or not in"
                " every epoch. Leave val_check_interval and check_val_every_n_epoch out."
            )
        self._set(trainer, due=trainer.global_step > 0 and self._is_due(trainer))

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._before = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._set(trainer, due=trainer.global_step > self._before and self._is_due(trainer))

    def _is_due(self, trainer: pl.Trainer) -> bool:
        return trainer.global_step % self.steps == 0 or trainer.global_step == trainer.max_steps

    def _set(self, trainer: pl.Trainer, *, due: bool) -> None:
        trainer.val_check_batch = 1 if due else _NEVER
