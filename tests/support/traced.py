"""A fit of which steps are traced, with the callbacks that write what came of it."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from parity import Module, Rows, quiet_trainer
from reference import Recipe, data
from torch.utils.data import DataLoader

from lightning_3d.app.training.callbacks import MetricsCSV
from lightning_3d.app.training.timeline import RunReport, Timeline
from lightning_3d.layout import Layout
from lightning_3d.tracing.trace import StepTrace

Part = tuple[list[StepTrace | None], int, dict[int, dict[str, float]]]
"""Of one rank: what each step came to, bytes of its parameters, and what its logger was told by
step."""


class Asks(pl.Callback):
    """Asks for step 3, on all ranks."""

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            trainer.strategy.trace_next_step()


class Watch(pl.Callback):
    """Keeps what each step came to."""

    def __init__(self) -> None:
        self.traces: list[StepTrace | None] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.strategy.last_step.grad_norm is not None:
            self.traces.append(trainer.strategy.last_step.trace)


class Remembers(Logger):
    """A logger of Lightning's interface."""

    name, version = "remembers", "0"

    def __init__(self) -> None:
        self.told: dict[int, dict[str, float]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing of these here."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.told.setdefault(step or 0, {}).update(metrics)


def fit(folder: str, layout: str, every: int | None, accumulate: int = 1, **strategy: Any) -> Part:
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=4)
    # Without the proof of the loss, which looks at the micro-batches of step 4 while they run.
    plan = Lightning3DStrategy(
        layout, micro_batch_size=1, trace_every_n_steps=every, self_check="never", **strategy
    )
    watch, logger, path = Watch(), Remembers(), Path(folder)
    trainer = quiet_trainer(
        strategy=plan,
        devices=Layout.parse(layout).world_size,
        max_steps=4,
        logger=logger,
        log_every_n_steps=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        callbacks=[
            Asks(),
            watch,
            MetricsCSV(path / "metrics.csv"),
            Timeline(path / "timeline.json"),
            RunReport(path),
        ],
    )
    module = Module(recipe)
    trainer.fit(module, DataLoader(Rows(data(recipe)), batch_size=4))
    return watch.traces, sum(parameter.nbytes for parameter in module.parameters()), logger.told
