"""The callback that keeps an exponential moving average of the weights, in every layout and at
every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.layout.sizes import check_decay
from lightning_3d.parallel.zero.average import WeightAverage
from lightning_3d.strategy.rank_hooks import RankHooks


class ExponentialAverage(pl.Callback):
    """Keeps an exponential moving average (EMA) of the trained weights, in every layout and at
    every ZeRO stage.

    After each optimizer step it becomes decay * average + (1 - decay) * weights. It begins as the
    weights after the first step. Saved buffers of floating-point numbers (running statistics, for
    example) are averaged too; the others, such as counts, keep their values. This is what
    Lightning's `EMAWeightAveraging(decay)` computes on one process, except that it averages counts
    too.

    Each rank averages the elements that its optimizer steps, so with ZeRO 1 to 3 the average takes
    1 / (dp * cp) of its size.

    A validation during a fit uses the average. Checkpoints have weights and average, and a fit
    resumes both in any layout. A validation, test or prediction with `ckpt_path` reads the average
    of the checkpoint. After the fit the module has the weights; `load_full_state_dict(path,
    average=True)` reads the average.

    Args:
        decay: at least 0 and below 1. 0.999 averages about the last 1000 steps.

    Raises:
        ConfigError: another decay, or another strategy.
    """

    def __init__(self, decay: float = 0.999) -> None:
        check_decay("decay", decay)
        self.decay = decay
        self._step = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, RankHooks):
            raise ConfigError(
                "ExponentialAverage needs Lightning3DStrategy; the strategy is"
                f" {type(trainer.strategy).__name__}. Use EMAWeightAveraging of Lightning."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        average = _kept(trainer)
        # else further batches of the step follow
        if average is not None and trainer.global_step > self._step:
            self._step = trainer.global_step
            average.update()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average = _kept(trainer)
        if average is not None:
            average.show()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        average = _kept(trainer)
        if average is not None:
            average.hide()


def average_of(trainer: pl.Trainer) -> ExponentialAverage | None:
    """Return the callback of a trainer; None if it has none.

    Raises:
        ConfigError: there are several.
    """
    found = [callback for callback in trainer.callbacks if isinstance(callback, ExponentialAverage)]  # type: ignore[attr-defined]
    if len(found) > 1:
        raise ConfigError(
            "There are several ExponentialAverage callbacks, and checkpoints have one average. Use"
            " one of them."
        )
    return found[0] if found else None


@contextmanager
def showing_average(trainer: pl.Trainer) -> Iterator[None]:
    """Context in which the average of a fit, if it keeps one, is in the place of the weights.
    Collective."""
    average = _kept(trainer)
    if average is not None:
        average.show()
    yield
    if average is not None:  # not after an error, which other ranks may not have
        average.hide()


def _kept(trainer: pl.Trainer) -> WeightAverage | None:
    average: WeightAverage | None = trainer.strategy.built.backend.average  # type: ignore[attr-defined]
    return average
