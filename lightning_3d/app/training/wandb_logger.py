"""Weights & Biases for a job of many ranks: one run, tokens seen as the x axis. Its failures never
end training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import loggers
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_3d.app.runs.wandb_access import check_access, is_offline, require_host
from lightning_3d.app.training.callbacks.metrics_csv import TOKENS_SEEN
from lightning_3d.app.training.wandb_service import (
    answered_within,
    end_service,
    end_service_after,
    forget_service,
    services,
)
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout

_SECONDS = {"init_timeout": 90.0, "finish_timeout": 300.0}
"""Seconds that the start of a run waits for an answer, and its end for data that is still being
sent."""

ANSWER_SECONDS = 60.0
"""Seconds that a call may take beyond its own timeout before wandb's process counts as hung."""

_WITHOUT_END = 1e6
"""Seconds that stand for a timeout of 0, which means none."""

_ROOM = 100
"""Steps for rows that are written after a checkpoint, or past this logger. Steps may have gaps."""

OFFLINE_SECONDS = 30.0
"""Seconds that the end of an offline run may take."""


def _or_without(method: Callable[..., None]) -> Callable[..., None]:
    """Disable logging, with one warning, when a method fails. A run that cannot start is an error
    of the user (ConfigError)."""

    @wraps(method)
    def guarded(self: WandbLogger, *args: Any, **kwargs: Any) -> None:
        if self.lost:
            return
        try:
            with answered_within(self.patience(method.__name__)):
                method(self, *args, **kwargs)
        except ConfigError:
            raise
        except Exception as error:
            self.lost = True
            if isinstance(error, TimeoutError):
                end_service()  # this process would wait for it when it ends
            if not services():
                forget_service()
            rank_zero_warn(
                "Logging to Weights & Biases is disabled for the rest of this run:"
                f" {_reason(error)}"
            )

    return guarded


class WandbLogger(loggers.WandbLogger):
    """Lightning's `WandbLogger` for a job of many ranks. It takes the same arguments, as keywords.

    Only rank 0 has a run. The layout is added to its tags. Numbers of `MetricsCSV` are plotted over
    the tokens seen. If Weights & Biases fails during training, logging to it stops with one warning
    and training continues.

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
        super().__init__(offline=offline, **kwargs)
        if self._wandb_init["anonymous"] is None:
            del self._wandb_init["anonymous"]  # wandb warns about it
        self.lost = False
        self._settings = dict(settings or {})
        self._seconds = {
            name: float(value)
            for name, value in (_SECONDS | self._settings).items()
            if name in _SECONDS
        }
        if is_offline(offline) and "finish_timeout" not in self._settings:
            self._seconds["finish_timeout"] = OFFLINE_SECONDS
        self._drawn_over_tokens: set[str] = set()
        self._first_step = first_step
        self._rows = 0

    @property
    def next_step(self) -> int:
        """A step at Weights & Biases after all rows that this logger has written, with room for
        those that are written elsewhere."""
        begun = self._first_step
        if self._experiment is not None:
            begun = max(begun, self._experiment.starting_step)
        return begun + self._rows + _ROOM if self._rows else begun

    def patience(self, method: str) -> float:
        """Seconds after which a call counts as hung: more than its own timeout."""
        if method in ("close", "finalize"):
            return (self._seconds["finish_timeout"] or _WITHOUT_END) + ANSWER_SECONDS
        return ANSWER_SECONDS + (self._seconds["init_timeout"] if self._experiment is None else 0.0)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        if self._experiment is not None:
            return self._experiment
        self._wandb_init["settings"] = (
            _known({"quiet": True, "finish_timeout_raises": True, **self._seconds}) | self._settings
        )
        end_service_after(self.patience("close"))
        try:
            if not is_offline(self._offline):
                require_host()
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
    @_or_without
    def log_graph(self, model: pl.LightningModule, input_array: Any = None) -> None:
        """Add the layout's tags. The Trainer calls this once its strategy is known."""
        self.experiment.tags = tuple(
            dict.fromkeys([*(self.experiment.tags or ()), *layout_tags(model.trainer.strategy)])
        )

    @override
    @rank_zero_only
    @_or_without
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        super().log_hyperparams(*args, **kwargs)

    @override
    @rank_zero_only
    @_or_without
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if TOKENS_SEEN in metrics:
            self._draw_over_tokens(metrics)
        super().log_metrics(metrics, step)
        self._rows += 1

    def _draw_over_tokens(self, names: Mapping[str, float]) -> None:
        prefix = f"{self._prefix}{self.LOGGER_JOIN_CHAR}" if self._prefix else ""
        for name in names.keys() - self._drawn_over_tokens - {TOKENS_SEEN}:
            self.experiment.define_metric(prefix + name, step_metric=prefix + TOKENS_SEEN)
        self._drawn_over_tokens |= names.keys()

    @override
    @_or_without
    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        super().after_save_checkpoint(checkpoint_callback)

    @override
    @rank_zero_only
    @_or_without
    def finalize(self, status: str) -> None:
        """End the run after a failure. After success another fit or a test may continue it."""
        super().finalize(status)
        if status != "success":
            self.close(1)

    @_or_without
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


def _known(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Remove settings that this version of wandb does not have."""
    from wandb import Settings

    return {name: value for name, value in settings.items() if name in Settings.model_fields}


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if words.endswith((".", "!", "?")) else f"{words}."
