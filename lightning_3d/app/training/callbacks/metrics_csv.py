"""Callback that writes `metrics.csv`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_3d.app.runs.metrics_file import column, csv_lines, keep_rows, read_rows
from lightning_3d.app.training.step_clock import StepClock, last_val_loss
from lightning_3d.storage.surviving import Surviving
from lightning_3d.tracing.trace import MOST_RANKS, StepTrace

COLUMNS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "step_seconds",
    "val_loss",
    "aux_loss",
    "max_load",
    "dropped",
    "bubble",
    "memory",
    "tokens_seen",
    "mfu",
    "slow_rank",
    "slow_host",
    "slow_factor",
)
"""Columns of `metrics.csv`. An empty cell means that the step has no such number.

Mixture of experts: `aux_loss` is the balancing loss; `max_load` is the tokens of the fullest expert
divided by the mean, and `dropped` the fraction of tokens that exceeded the capacity, each for the
layer where it is largest.

Traced steps: `bubble` is the measured bubble, 0 to 1 (see `lightning_3d.tracing.trace`); `memory`
is the peak memory in bytes of the rank that used most.

`tokens_seen` counts the tokens of all steps up to this one. `mfu` is the model's share of the
devices' peak rate, 0 to 1.

`slow_rank` is the rank that computes longest compared with its peers, `slow_host` its machine, and
`slow_factor` how many times as long it takes, in the last ten steps.

If the loss has several parts that the module names (`loss_parts`), a column for each follows, and
if the data module names its validation sets (`val_names`), a column `val_loss/NAME` for each."""

VAL_LOSS = "val_loss/"
"""How the name of the loss of a named validation set begins."""

TEXTS = ("slow_host",)
"""Columns that are not numbers. Only loggers whose attribute `takes_text` is true get them."""

TOKENS_SEEN = "step/tokens_seen"
"""Name under which loggers get `tokens_seen`."""


class MetricsCSV(Callback):
    """Write one CSV row per optimizer step, complete on disk when the step ends. Accumulated
    batches share a row.

    A validation loss is added to the row of the step before it. Loggers get the same numbers
    (`step/loss` and so on) every `log_every_n_steps` of the Trainer and for every traced step. For
    a traced step, they also get the memory of each rank in bytes (`memory/rank_0`) if there are at
    most 64 ranks, and for a mixture of experts the load of each router (`router/max_load/NAME`).

    If the disk is full, training continues without further rows, after one warning.

    A resumed run continues the same file. When its first step has ended, rows of steps that it
    repeats are removed. Checkpoints hold the number of tokens seen.

    Args:
        path: the file, usually `metrics.csv` in the run folder; its folder is created.
        full_speed: tokens per second at which the model's operations would use the devices' full
            peak rate, for `mfu`; None if unknown.
    """

    def __init__(self, path: str | Path, full_speed: float | None = None) -> None:
        self._path = Path(path)
        self._full_speed = full_speed
        self._tokens_seen: float | None = None
        self._clock = StepClock()
        self._file: TextIO | None = None
        # rows of earlier attempts, until the first step has ended
        self._kept: list[dict[str, str]] | None = None
        self._columns: tuple[str, ...] = COLUMNS
        self._parts: tuple[str, ...] = ()
        self._row: dict[str, Any] = {}
        self._row_start: int | None = None
        self._surviving = Surviving(self._path, "some rows")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._clock = StepClock()
        self._kept = kept = read_rows(self._path, last_step=trainer.global_step)
        if self._tokens_seen is None or trainer.global_step == 0:
            self._tokens_seen = sum(column(kept, "tokens"))
        of_sets = dict.fromkeys(name for row in kept for name in row if name.startswith(VAL_LOSS))
        self._parts = tuple(getattr(pl_module, "loss_parts", ()))
        self._columns = (*COLUMNS, *self._parts, *(of_sets | dict.fromkeys(_named_losses(trainer))))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._clock.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        numbers = self._clock.stop(trainer, outputs, batch)
        if numbers is None:
            return
        if self._kept is not None:
            self._begin(self._kept)
        self._tokens_seen = (self._tokens_seen or 0.0) + numbers.tokens
        self._row = {
            "step": numbers.step,
            "loss": f"{numbers.loss:.9g}",
            "grad_norm": "" if numbers.grad_norm is None else f"{numbers.grad_norm:.9g}",
            "lr": f"{numbers.lr:.9g}",
            "tokens": round(numbers.tokens),
            "tokens_per_second": f"{numbers.tokens_per_second:.1f}",
            "step_seconds": f"{numbers.seconds:.6f}",
            "tokens_seen": round(self._tokens_seen),
        }
        self._row |= {name: f"{float(trainer.callback_metrics[name]):.9g}" for name in self._parts}
        if self._full_speed:
            self._row["mfu"] = f"{numbers.tokens_per_second / self._full_speed:.6f}"
        if numbers.routers is not None:
            self._row["aux_loss"] = f"{numbers.routers.aux_loss:.9g}"
            self._row["max_load"] = f"{max(numbers.routers.max_over_mean):.4f}"
            self._row["dropped"] = f"{max(numbers.routers.dropped):.4f}"
        if numbers.slowest is not None:
            self._row["slow_rank"] = numbers.slowest.rank
            self._row["slow_host"] = numbers.slowest.host
            self._row["slow_factor"] = f"{numbers.slowest.factor:.4f}"
        if numbers.trace is not None:
            self._row["bubble"] = f"{numbers.trace.bubble:.6f}"
            self._row["memory"] = numbers.trace.peak_memory
        self._row_start = None  # stays None if the row cannot be written
        if self._file is not None:
            with self._surviving:
                self._row_start = self._file.seek(0, os.SEEK_END)
                self._write_row(self._file)
        if numbers.trace is not None or numbers.step % max(1, trainer.log_every_n_steps) == 0:  # type: ignore[attr-defined]
            known = {
                name: value for name, value in self._row.items() if name != "step" and value != ""
            }
            row = {
                f"step/{name}": float(value) for name, value in known.items() if name not in TEXTS
            }
            texts = {f"step/{name}": value for name, value in known.items() if name in TEXTS}
            _log(
                trainer,
                numbers.step,
                row | _of_ranks(numbers.trace) | _of_routers(numbers.routers),
                texts,
            )

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = last_val_loss(trainer)
        if trainer.sanity_checking or value is None or not self._row:
            return
        self._row["val_loss"] = f"{value:.9g}"
        self._row |= {name: f"{loss:.9g}" for name, loss in _named_losses(trainer).items()}
        if self._file is not None and self._row_start is not None:
            with self._surviving:
                self._file.seek(self._row_start)
                self._write_row(self._file)
                self._file.truncate()
        _log(
            trainer,
            self._row["step"],
            {
                "step/val_loss": float(self._row["val_loss"]),
                TOKENS_SEEN: float(self._row["tokens_seen"]),
            },
        )

    def _begin(self, kept: list[dict[str, str]]) -> None:
        """Open the file with the rows of earlier attempts that count."""
        self._kept = None
        with self._surviving:
            keep_rows(self._path, self._columns, kept)
            self._file = self._path.open("r+", encoding="utf-8", newline="")

    def _write_row(self, file: TextIO) -> None:
        file.write(csv_lines(self._columns, [self._row]))
        file.flush()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self._tokens_seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens_seen = state_dict["tokens_seen"]

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            with self._surviving:
                self._file.close()
            self._file = None
            self._row = {}
        self._kept = None


def _log(
    trainer: Trainer, step: int, numbers: dict[str, float], texts: Mapping[str, str] | None = None
) -> None:
    """Log numbers of a step to all loggers, and texts to those that take them."""
    for logger in trainer.loggers:
        more: dict[str, Any] = dict(texts or {}) if getattr(logger, "takes_text", False) else {}
        logger.log_metrics(numbers | more, step=step)


def _of_ranks(trace: StepTrace | None) -> dict[str, float]:
    ranks = trace.ranks if trace is not None and len(trace.ranks) <= MOST_RANKS else ()
    return {f"memory/rank_{each.rank}": float(each.memory.total) for each in ranks}


def _of_routers(routers: Any) -> dict[str, float]:
    if routers is None:
        return {}
    numbers = {"router/aux_loss": routers.aux_loss, "router/z_loss": routers.z_loss}
    return numbers | {
        f"router/max_load/{layer}": load
        for layer, load in zip(routers.layers, routers.max_over_mean, strict=True)
    }


def _named_losses(trainer: Trainer) -> dict[str, float]:
    """Return the latest loss of each named validation set, nan before the first validation."""
    names = [
        f"{VAL_LOSS}{name}"
        for name in getattr(getattr(trainer, "datamodule", None), "val_names", ())
    ]
    return {name: float(trainer.callback_metrics.get(name, math.nan)) for name in names}
