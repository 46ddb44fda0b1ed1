"""Callback that writes `routers.csv`: load and dropped tokens of each router of a mixture of
experts, on rank 0."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_3d.app.runs.metrics_file import keep_rows, read_rows
from lightning_3d.storage.surviving import Surviving

COLUMNS = ("step", "layer", "max_load", "dropped", "tokens")
"""Columns of `routers.csv`: `max_load` is the tokens of the fullest expert divided by the mean,
`tokens` those of each expert."""


class RouterLog(Callback):
    """Callback that writes one row for each router. A dense model gets no file. Loggers get load
    and losses from `MetricsCSV`.

    A resumed run continues the same file; rows of steps that it repeats are removed first.

    Args:
        path: the file, usually `routers.csv` in the run folder.
        every: optimizer steps between two entries.
    """

    def __init__(self, path: str | Path, every: int = 10) -> None:
        self._path = Path(path)
        self._every = max(1, every)
        self._surviving = Surviving(self._path)
        self._started = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        last: Any = getattr(trainer.strategy, "last_step", None)
        if (
            not trainer.is_global_zero
            or trainer.global_step % self._every
            or getattr(last, "grad_norm", None) is None
        ):
            return  # first what can be known without waiting for the device
        routers = getattr(last, "routers", None)
        if routers is None:
            return
        with self._surviving:
            self._write(trainer.global_step, routers)

    def _write(self, step: int, routers: Any) -> None:
        if not self._started:
            self._begin(step - 1)
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            rows = zip(
                routers.layers, routers.max_over_mean, routers.dropped, routers.tokens, strict=True
            )
            for layer, load, dropped, tokens in rows:
                writer.writerow(
                    [step, layer, f"{load:.4f}", f"{dropped:.4f}", " ".join(map(str, tokens))]
                )

    def _begin(self, last_step: int) -> None:
        """Start the file with the rows of an earlier one up to `last_step`."""
        keep_rows(self._path, COLUMNS, read_rows(self._path, last_step=last_step))
        self._started = True
