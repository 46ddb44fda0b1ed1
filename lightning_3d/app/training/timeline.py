"""Callbacks that write `timeline.json` (a traced step) and `report.html` (a run), on rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from typing_extensions import override

from lightning_3d.app.runs.report.run import About, write_report
from lightning_3d.app.runs.status import FAILED, FINISHED, INTERRUPTED
from lightning_3d.engine.step.loss_weights import TokenMeanLoss
from lightning_3d.storage.surviving import Surviving
from lightning_3d.strategy import Lightning3DStrategy
from lightning_3d.tracing.chrome import write_timeline

WARM_UP_STEPS = 2
"""Steps of a fit before the one that is traced by default: the first ones allocate buffers and
connect ranks."""


class Timeline(Callback):
    """Write the latest traced step to a file that Perfetto opens.

    If the strategy traces no steps by itself (`trace_every_n_steps=None`), this callback traces one
    step of each fit: the third, or the last of a shorter fit.

    Args:
        path: the file, usually `timeline.json` in the run folder.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._surviving = Surviving(self._path)
        self._traced_step: int | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._traced_step = None
        if (
            isinstance(trainer.strategy, Lightning3DStrategy)
            and trainer.strategy.trace_every_n_steps is None
        ):
            step = trainer.global_step + WARM_UP_STEPS
            self._traced_step = (
                step
                if trainer.max_steps < 0
                else max(min(step, trainer.max_steps - 1), trainer.global_step)
            )

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._traced_step == trainer.global_step and isinstance(
            trainer.strategy, Lightning3DStrategy
        ):
            self._traced_step = None
            trainer.strategy.trace_next_step()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        trace = getattr(getattr(trainer.strategy, "last_step", None), "trace", None)
        if trace is None or not trainer.is_global_zero:
            return
        with self._surviving:
            write_timeline(self._path, trace)


class RunReport(Callback):
    """Write `report.html` when a fit has ended or failed, from the files that `MetricsCSV` and
    `Timeline` wrote.

    Use it with your own Trainer. `lightning-3d train` needs no callback: it writes the report
    itself, including how the run ended.

    Args:
        folder: folder with `metrics.csv` and `timeline.json`.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        ended = INTERRUPTED if isinstance(exception, KeyboardInterrupt) else FAILED
        self._write(trainer, pl_module, ended, f"{type(exception).__name__}: {exception}")

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer, pl_module, FINISHED, "")

    def _write(
        self, trainer: Trainer, pl_module: LightningModule, status: str, reason: str
    ) -> None:
        if not trainer.is_global_zero:
            return
        layout = getattr(trainer.strategy, "layout", None)
        about = About(
            model=type(pl_module).__name__,
            layout=layout.name if layout is not None else "tp1",
            order=layout.order if layout is not None else None,
            schedule=getattr(trainer.strategy, "schedule", "") if layout is not None else "",
            nodes=trainer.num_nodes,
            status=status,
            reason=reason,
            counted=what_is_counted(trainer.strategy, pl_module),
        )
        write_report(self._folder, about)


def what_is_counted(strategy: Any, module: nn.Module) -> str:
    """Name what `Lightning3DStrategy` averages losses over: "tokens" if a causal language model
    computes its own loss, else "rows"."""
    own = any(
        isinstance(getattr(part, "loss_function", None), TokenMeanLoss) for part in module.modules()
    )
    return "tokens" if own or not hasattr(strategy, "last_step") else "rows"
