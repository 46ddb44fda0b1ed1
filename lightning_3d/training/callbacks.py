"""What a run shows and leaves behind, on rank 0: a progress line, a metrics file, a closing table."""

from __future__ import annotations

import csv
import io
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar as LightningProgressBar
from typing_extensions import override

from lightning_3d.checkpoint.outcome import NotSaved, SaveOutcome
from lightning_3d.metrics_file import column
from lightning_3d.tracing.trace import MOST_RANKS, StepTrace
from lightning_3d.training.step_clock import StepClock, StepNumbers

COLUMNS = (
    "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "step_seconds", "val_loss", "aux_loss", "max_load", "dropped",
    "bubble", "memory", "tokens_seen", "mfu",
)  # fmt: skip
"""Columns of `metrics.csv`; an empty cell is a number that does not exist for that step.

Of a mixture of experts: the balancing loss, and of the layer where they are largest the tokens of the fullest expert divided by the mean,
and the fraction of tokens that found no room.

Of a step that was traced: the measured bubble, 0 to 1 (see `lightning_3d.tracing.trace`), and the bytes of the fullest rank at its peak.

`tokens_seen` are those of all steps up to this one, `mfu` is the share of the devices' peak rate that the model's operations take,
0 to 1."""

TOKENS_SEEN = "step/tokens_seen"
"""What loggers get it as, with all else of the same step."""


def last_val_loss(trainer: Trainer) -> float | None:
    value = trainer.callback_metrics.get("val_loss")
    return None if value is None else float(value)


class MetricsCSV(Callback):
    """Writes one row per optimizer step, complete on disk when the step ends; where gradients accumulate, a row adds up its batches. A
    validation is put into the row of the step before it. The same numbers go to the loggers, as `step/loss` and so on, every
    `log_every_n_steps` of the Trainer and of steps that were traced. With them go the memory of each rank of a traced step, as
    `memory/rank_0` in bytes, where there are not more than 64, and what each router of a mixture of experts did, as `router/max_load/NAME`.

    Where the disk is full, training continues: a warning says so once, and rows are missing.

    A resumed run goes on in the same file: rows of steps that it repeats are removed first. How many tokens it has seen is in checkpoints.

    Args:
        path: of the file, usually `metrics.csv` in the run folder; its folder is created.
        full_speed: tokens a second at which the model's operations would take all of the devices' peak rate, for `mfu`; None: not known.
    """

    def __init__(self, path: str | Path, full_speed: float | None = None) -> None:
        self._path = Path(path)
        self._full_speed = full_speed
        self._tokens_seen: float | None = None
        self._clock = StepClock()
        self._file: TextIO | None = None
        self._row: dict[str, Any] = {}
        self._row_start: int | None = None
        self._warned = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        self._clock = StepClock()
        kept = rows_until(self._path, trainer.global_step)
        if self._tokens_seen is None or trainer.global_step == 0:
            self._tokens_seen = sum(column(kept, "tokens"))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("w", newline="")
        with self._surviving():
            self._file.write(_csv_lines([dict(zip(COLUMNS, COLUMNS, strict=True)), *kept]))
            self._file.flush()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._file is None:
            return
        numbers = self._clock.stop(trainer, outputs, batch)
        if numbers is None:
            return
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
        if self._full_speed:
            self._row["mfu"] = f"{numbers.tokens_per_second / self._full_speed:.6f}"
        if numbers.routers is not None:
            self._row["aux_loss"] = f"{numbers.routers.aux_loss:.9g}"
            self._row["max_load"] = f"{max(numbers.routers.max_over_mean):.4f}"
            self._row["dropped"] = f"{max(numbers.routers.dropped):.4f}"
        if numbers.trace is not None:
            self._row["bubble"] = f"{numbers.trace.bubble:.6f}"
            self._row["memory"] = numbers.trace.peak_memory
        self._row_start = None  # of a row that is not written
        with self._surviving():
            self._row_start = self._file.tell()
            self._write_row()
        if numbers.trace is not None or numbers.step % max(1, trainer.log_every_n_steps) == 0:  # type: ignore[attr-defined]
            told = {f"step/{name}": float(value) for name, value in self._row.items() if name != "step" and value != ""}
            _tell(trainer, numbers.step, told | _of_ranks(numbers.trace) | _of_routers(numbers.routers))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = last_val_loss(trainer)
        if self._file is None or trainer.sanity_checking or value is None or not self._row:
            return
        self._row["val_loss"] = f"{value:.9g}"
        if self._row_start is not None:
            with self._surviving():
                self._file.seek(self._row_start)
                self._file.truncate()
                self._write_row()
        _tell(trainer, self._row["step"], {"step/val_loss": float(self._row["val_loss"]), TOKENS_SEEN: float(self._row["tokens_seen"])})

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Warn, once, of what the storage refuses: metrics are not worth a run."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(f"{self._path} misses rows from here on, and training continues: {error}", stacklevel=2)

    def _write_row(self) -> None:
        assert self._file is not None
        self._file.write(_csv_lines([self._row]))
        self._file.flush()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": self._tokens_seen}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._tokens_seen = state_dict["tokens_seen"]

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            with self._surviving():
                self._file.close()
            self._file = None
            self._row = {}


def _tell(trainer: Trainer, step: int, numbers: dict[str, float]) -> None:
    """Hand numbers of a step to all loggers: the one place where that is done."""
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=step)


def _of_ranks(trace: StepTrace | None) -> dict[str, float]:
    ranks = trace.ranks if trace is not None and len(trace.ranks) <= MOST_RANKS else ()
    return {f"memory/rank_{each.rank}": float(each.memory.total) for each in ranks}


def _of_routers(routers: Any) -> dict[str, float]:
    if routers is None:
        return {}
    numbers = {"router/aux_loss": routers.aux_loss, "router/z_loss": routers.z_loss}
    return numbers | {f"router/max_load/{layer}": load for layer, load in zip(routers.layers, routers.max_over_mean, strict=True)}


def rows_until(path: Path, step: int) -> list[dict[str, str]]:
    """Rows of a metrics file whose step is at most `step`; none when there is no file. A last row cut off by a crash is
    left out.
    """
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values() and (row.get("step") or "").isdigit()]
    return [row for row in rows if int(row["step"]) <= step]


def _csv_lines(rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue()


class ProgressBar(LightningProgressBar):
    """One line with step, loss, tokens/s, step time and time left.

    On a terminal the line is rewritten in place; elsewhere a new one is printed every `every` steps. Step time and
    tokens/s are means over the last `window` steps.

    Args:
        every: steps between lines when the output is no terminal.
        stream: where to write; None is the standard output of the moment.
    """

    def __init__(self, every: int = 10, *, window: int = 20, stream: TextIO | None = None) -> None:
        super().__init__()
        self._every = max(1, every)
        self._recent: deque[StepNumbers] = deque(maxlen=max(1, window))
        self._clock = StepClock()
        self._stream = stream
        self._enabled = True
        self._width = 0

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        self._end_line()
        print(*args, file=self._out, flush=True)

    @property
    def _out(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stdout

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = StepClock()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._enabled:
            return
        numbers = self._clock.stop(trainer, outputs, batch)
        if numbers is None:
            return
        self._recent.append(numbers)
        total = _total_steps(trainer)
        step = trainer.global_step
        if self._out.isatty():
            line = progress_line(self._recent, total)
            self._out.write("\r" + line.ljust(self._width))
            self._out.flush()
            self._width = len(line)
        elif step % self._every == 0 or step == 1 or step == total:
            print(progress_line(self._recent, total), file=self._out, flush=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = last_val_loss(trainer)
        if self._enabled and not trainer.sanity_checking and value is not None:
            self.print(f"step {trainer.global_step}: validation loss {value:.4f}")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled:
            self._end_line()

    def _end_line(self) -> None:
        """Leave the line that is being rewritten."""
        if self._width:
            self._out.write("\n")
            self._width = 0


def progress_line(recent: Iterable[StepNumbers], total: int | None) -> str:
    """One line on the latest of some consecutive steps; speeds are means over them.

    Args:
        total: steps of the run, None when it has no end.
    """
    steps = list(recent)
    latest = steps[-1]
    seconds = sum(step.seconds for step in steps)
    mean = seconds / len(steps)
    speed = sum(step.tokens for step in steps) / seconds if seconds > 0 else 0.0
    place = f"step {latest.step}" if total is None else f"step {latest.step:{len(str(total))}d}/{total}"
    line = f"{place} | loss {latest.loss:.4f} | {speed:,.0f} tokens/s | {mean:.3f} s/step"
    if latest.routers is not None:
        line += f" | fullest expert {max(latest.routers.max_over_mean):.2f} x mean"
    if total is not None:
        line += f" | {format_seconds(max(0, total - latest.step) * mean)} left"
    return line


def _total_steps(trainer: Trainer) -> int | None:
    if trainer.max_steps > 0:
        return trainer.max_steps
    estimate = trainer.estimated_stepping_batches
    return None if estimate == float("inf") else int(estimate)


def format_seconds(seconds: float) -> str:
    """`0:42`, `12:05`, `3:07:30`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Summary(Callback):
    """Prints a table when a fit has ended: model, layout, steps, speed, losses beside the entropies of the text,
    checkpoint.

    Args:
        model_name: name of the model for the first row; None is the type of the configuration or the module's class.
        stream: where to write; None is the standard output of the moment.
    """

    def __init__(self, model_name: str | None = None, *, stream: TextIO | None = None) -> None:
        self._model_name = model_name
        self._stream = stream
        self._clock = StepClock()
        self._steps: int = 0
        self._skipped = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._losses: deque[float] = deque(maxlen=20)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = StepClock()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
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
        self._steps += 1
        self._tokens += numbers.tokens
        self._seconds += numbers.seconds
        if numbers.skipped:
            self._skipped += 1
        else:
            self._losses.append(numbers.loss)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, NotSaved):  # all steps were made
            self._show(trainer, pl_module)

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._steps:
            out = self._stream if self._stream is not None else sys.stdout
            print("\n" + format_table(self.rows(trainer, pl_module)), file=out, flush=True)

    def rows(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str]]:
        """The rows of the table, as (label, value)."""
        unit = getattr(trainer.datamodule, "unit", "token")  # type: ignore[attr-defined]
        rows = [("model", self._describe_model(pl_module)), ("layout", _describe_layout(trainer))]
        rows.append(
            (
                "steps",
                f"{trainer.global_step:,}"
                + (f" ({self._steps:,} in this run)" if self._steps != trainer.global_step else ""),
            )
        )
        rows.append(("tokens", f"{self._tokens:,.0f}"))
        rows.append(("time in steps", f"{format_seconds(self._seconds)} ({self._seconds / self._steps:.3f} s/step)"))
        rows.append(("speed", f"{self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s"))
        if self._skipped:
            rows.append(("skipped steps", f"{self._skipped:,}: loss or gradient norm was not finite"))
        if self._losses:
            mean = sum(self._losses) / len(self._losses)
            rows.append(("training loss", f"{mean:.4f} nats/{unit}, mean of the last {len(self._losses)} steps"))
        rows += _validation_rows(trainer, unit)
        rows.append(("checkpoint", _describe_checkpoint(trainer)))
        return rows

    def _describe_model(self, pl_module: LightningModule) -> str:
        config = getattr(pl_module, "config", None)
        name = self._model_name or getattr(config, "model_type", None) or type(pl_module).__name__
        count = getattr(pl_module, "parameter_count", 0)
        return f"{name}, {count:,} parameters" if count else name


def _describe_layout(trainer: Trainer) -> str:
    """Layout, schedule and ZeRO stage, of strategies that have them."""
    strategy = trainer.strategy
    layout = getattr(strategy, "layout", None)
    if layout is None:
        return f"{trainer.world_size} x {type(strategy).__name__}"
    words = [f"{layout.name} on {trainer.world_size} rank{'s' * (trainer.world_size > 1)}"]
    if getattr(layout, "pp", 1) > 1:
        words.append(str(getattr(strategy, "schedule", "")))
    zero = getattr(strategy, "zero", None)
    if zero is not None:
        words.append(zero.describe())
    return ", ".join(word for word in words if word)


def _describe_checkpoint(trainer: Trainer) -> str:
    """The best checkpoint of the run, or the newest, if it is there: a save may have failed."""
    outcome: SaveOutcome | None = getattr(trainer.strategy, "save_outcome", None)
    best = getattr(trainer.checkpoint_callback, "best_model_path", "") if trainer.checkpoint_callback else ""
    if outcome is None or outcome.lost is None:
        return best or "none"
    newest = f"{outcome.saved.path} (step {outcome.saved.step})" if outcome.saved is not None else "none"
    missing = outcome.missing
    return newest if missing is None else f"{newest}; that of step {missing.step} could not be written"


def _validation_rows(trainer: Trainer, unit: str) -> list[tuple[str, str]]:
    """The held-out loss beside what models of frequencies alone would reach."""
    value = last_val_loss(trainer)
    if value is None:
        return []
    rows = [("validation loss", f"{value:.4f} nats/{unit}")]
    entropy = getattr(trainer.datamodule, "entropy", lambda: None)()  # type: ignore[attr-defined]
    if entropy is not None:
        rows.append(("  bigram entropy", f"{entropy.bigram:.4f} nats/{unit}, of the held-out text"))
        rows.append(("  unigram entropy", f"{entropy.unigram:.4f} nats/{unit}"))
    return rows


def format_table(rows: Iterable[tuple[str, str]]) -> str:
    """Two aligned columns between two rules, in plain text."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:{width}}  {value}" for label, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])
