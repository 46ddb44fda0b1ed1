"""Weights & Biases for a job of many ranks: one run that a resumed job continues, tokens seen as
the x axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import loggers
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_3d.app.runs.wandb_access import check_access
from lightning_3d.app.training.callbacks.metrics_csv import TOKENS_SEEN
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout

_ROOM = 100
"""Steps for rows that are written after a checkpoint, or past this logger. Steps may have gaps."""


class WandbLogger(loggers.WandbLogger):
    """Lightning's `WandbLogger` for a job of many ranks. It takes the same arguments, as keywords.

    Only rank 0 has a run. The layout is added to its tags. Numbers of `MetricsCSV` are plotted over
    the tokens seen.

    Args:
        first_step: where the steps of an offline file begin if it continues a run. Online, the
            server knows it.

    Raises:
        ConfigError: wandb is not installed, an online run has no API key, or Weights & Biases does
            not answer when the run starts.
    """

    takes_text = True
    """`MetricsCSV` logs texts too, such as the host of a slow rank."""

    def __init__(
        self,
        *,
        offline: bool = False,
        settings: Mapping[str, Any] | None = None,
        first_step: int = 0,
        **kwargs: Any,
    ) -> None:
        if getattr(rank_zero_only, "rank", 0) == 0:
            check_access(offline, "WandbLogger(offline=True)")
        super().__init__(offline=offline, settings={"quiet": True, **(settings or {})}, **kwargs)
        if self._wandb_init["anonymous"] is None:
            del self._wandb_init["anonymous"]  # wandb warns about it
        self._drawn_over_tokens: set[str] = set()
        self._first_step = first_step
        self._rows = 0
        self._failed: Any = None  # run that has lost numbers

    @property
    def next_step(self) -> int:
        """A step at Weights & Biases after all rows that this logger has written, with room for
        those that are written elsewhere."""
        begun = self._first_step
        if self._experiment is not None:
            begun = max(begun, self._experiment.starting_step)
        return begun + self._rows + _ROOM if self._rows else begun

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is not None:
            return self._experiment
        try:
            return self._continue_steps(super().experiment)
        except Exception as error:
            if self._id is None:
                raise ConfigError(
                    f"Weights & Biases cannot start a run: {_reason(error)} Set"
                    " logger.wandb.offline=true or WANDB_MODE=offline to write the run to disk,"
                    " and upload it later with `wandb sync`."
                ) from error
            rank_zero_warn(
                f"Weights & Biases cannot continue run {self._id}; it is written to disk instead:"
                f" {_reason(error)}"
            )
        return self._begin_offline()

    def _begin_offline(self) -> Any:
        import wandb

        wandb.teardown(exit_code=1)  # its service still has the run that did not start
        self._wandb_init["mode"] = "offline"
        return self._continue_steps(super().experiment)

    def _continue_steps(self, run: Any) -> Any:
        """Begin the steps of an offline file after those of the files before it: `wandb sync`
        leaves them as they are."""
        if run.offline and self._first_step > 0:
            run.log({}, step=self._first_step, commit=False)
        return run

    @override
    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Add the layout's tags. The Trainer calls this once its strategy is known."""
        self.experiment.tags = tuple(
            dict.fromkeys([*(self.experiment.tags or ()), *layout_tags(model.trainer.strategy)])
        )

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        run = self.experiment
        try:
            if TOKENS_SEEN in metrics:
                self._draw_over_tokens(metrics)
            super().log_metrics(metrics, step)
        except Exception as error:  # its failures end no training
            if run is not self._failed:
                rank_zero_warn(f"Weights & Biases lost numbers of this run: {_reason(error)}")
            self._failed = run
        self._rows += 1

    def _draw_over_tokens(self, names: Mapping[str, float]) -> None:
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        for name in names.keys() - self._drawn_over_tokens - {TOKENS_SEEN}:
            self.experiment.define_metric(prefix + name, step_metric=prefix + TOKENS_SEEN)
        self._drawn_over_tokens |= names.keys()

    @override
    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run after a failure. After success another fit or a test may continue it."""
        super().finalize(status)
        if status != "success":
            self.close(1)

    def close(self, exit_code: int = 0) -> None:
        """End the run at Weights & Biases: finished with exit code 0, else failed. Logging again
        continues it."""
        next_step = self.next_step
        run, self._experiment = self._experiment, None
        if run is not None:
            self._id = self._wandb_init["id"] = run.id
            self._first_step = next_step
            self._rows = 0
            self._drawn_over_tokens.clear()
            run.finish(exit_code=exit_code)


def layout_tags(strategy: Any) -> list[str]:
    """Tags of a run: each axis with its size, the schedule if there is a pipeline, and the ZeRO
    stage."""
    layout: Layout | None = getattr(strategy, "layout", None)
    if layout is None:
        return []
    return [
        *layout.name.split("_"),
        *([strategy.schedule] if layout.pp > 1 else []),
        f"zero{strategy.zero_stage}",
    ]


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if words.endswith((".", "!", "?")) else f"{words}."
