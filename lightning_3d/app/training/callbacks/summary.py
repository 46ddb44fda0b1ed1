"""Callback that prints the size of the model when a fit begins, and a table when it has ended."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_3d.app.training.callbacks.progress_bar import format_seconds
from lightning_3d.app.training.step_clock import StepClock, last_val_loss
from lightning_3d.checkpoint.outcome import NotSaved, SaveOutcome


class Summary(Callback):
    """Print the size of the model when a fit begins. When it has ended, print a table: model,
    layout, steps, speed, losses, entropies of the text, checkpoint.

    Args:
        model_name: model name for the first row; None uses the type of the configuration or the
            module's class.
        stream: text stream to write to; None is `sys.stdout` at the time of writing.
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
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        counts = getattr(trainer.strategy, "parameter_counts", None)
        if trainer.is_global_zero and counts is not None:
            whole, share = counts
            kept = f", of which rank 0 keeps {share:,}" if share < whole else ""
            self._print(f"{self._name(pl_module)}: {whole:,} parameters{kept}")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock = StepClock()

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
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # all steps were taken, only the last checkpoint is missing
        if isinstance(exception, NotSaved):
            self._show(trainer, pl_module)

    def _show(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._steps:
            self._print("\n" + format_table(self.rows(trainer, pl_module)))

    def _print(self, text: str) -> None:
        print(text, file=self._stream if self._stream is not None else sys.stdout, flush=True)

    def rows(self, trainer: Trainer, pl_module: LightningModule) -> list[tuple[str, str]]:
        """Rows of the table, as (label, value)."""
        unit = getattr(trainer.datamodule, "unit", "token")  # type: ignore[attr-defined]
        rows = [("model", self._describe_model(pl_module)), ("layout", _describe_layout(trainer))]
        if trainer.strategy.root_device.type == "cuda":
            rows.append(("device", torch.cuda.get_device_name(trainer.strategy.root_device)))
        rows.append(
            (
                "steps",
                f"{trainer.global_step:,}"
                + (f" ({self._steps:,} in this run)" if self._steps != trainer.global_step else ""),
            )
        )
        rows.append(("tokens", f"{self._tokens:,.0f}"))
        rows.append(
            (
                "time in steps",
                f"{format_seconds(self._seconds)} ({self._seconds / self._steps:.3f} s/step)",
            )
        )
        rows.append(("speed", f"{self._tokens / max(self._seconds, 1e-9):,.0f} tokens/s"))
        padding = getattr(trainer.datamodule, "padding_share", lambda: None)()  # type: ignore[attr-defined]
        if padding is not None:
            rows.append(("padding", f"{100 * padding:.2f} % of the tokens of training samples"))
        if self._skipped:
            rows.append(
                ("skipped steps", f"{self._skipped:,} (loss or gradient norm was not finite)")
            )
        if self._losses:
            mean, count = sum(self._losses) / len(self._losses), len(self._losses)
            of = f"mean of the last {count} steps" if count > 1 else "of the last step"
            rows.append(("training loss", f"{mean:.4f} nats/{unit}, {of}"))
        rows += _validation_rows(trainer, unit)
        rows.append(("checkpoint", _describe_checkpoint(trainer)))
        return rows

    def _describe_model(self, pl_module: LightningModule) -> str:
        name, count = self._name(pl_module), getattr(pl_module, "parameter_count", 0)
        return f"{name}, {count:,} parameters" if count else name

    def _name(self, pl_module: LightningModule) -> str:
        config = getattr(pl_module, "config", None)
        return str(
            self._model_name or getattr(config, "model_type", None) or type(pl_module).__name__
        )


def _describe_layout(trainer: Trainer) -> str:
    """Describe layout, schedule and ZeRO stage, where the strategy has them."""
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
    """Name the best checkpoint of the run; after a failed save, the newest complete one."""
    outcome: SaveOutcome | None = getattr(trainer.strategy, "save_outcome", None)
    best = (
        getattr(trainer.checkpoint_callback, "best_model_path", "")
        if trainer.checkpoint_callback
        else ""
    )
    if outcome is None or outcome.lost is None:
        return best or "none"
    newest = (
        f"{outcome.saved.path} (step {outcome.saved.step})" if outcome.saved is not None else "none"
    )
    missing = outcome.missing
    return (
        newest
        if missing is None
        else f"{newest}; the checkpoint of step {missing.step} could not be written"
    )


def _validation_rows(trainer: Trainer, unit: str) -> list[tuple[str, str]]:
    """Rows with the held-out loss, and the losses that unigram and bigram frequencies alone would
    reach."""
    value = last_val_loss(trainer)
    if value is None:
        return []
    rows = [("validation loss", f"{value:.4f} nats/{unit}")]
    rows += [
        (f"  {name}", f"{float(trainer.callback_metrics[f'val_loss/{name}']):.4f} nats/{unit}")
        for name in getattr(trainer.datamodule, "val_names", ())  # type: ignore[attr-defined]
    ]
    entropy = getattr(trainer.datamodule, "entropy", lambda: None)()  # type: ignore[attr-defined]
    if entropy is not None:
        rows.append(("  bigram entropy", f"{entropy.bigram:.4f} nats/{unit}, of the held-out text"))
        rows.append(("  unigram entropy", f"{entropy.unigram:.4f} nats/{unit}"))
    return rows


def format_table(rows: Iterable[tuple[str, str]]) -> str:
    """Format rows as two aligned columns between two rules, in plain text."""
    rows = list(rows)
    width = max(len(label) for label, _ in rows)
    lines = [f"{label:{width}}  {value}" for label, value in rows]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([rule, *lines, rule])
