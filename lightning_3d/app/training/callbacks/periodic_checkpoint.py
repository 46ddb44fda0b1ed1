"""Callback that saves during a fit, at its end, and when a signal ends it, and keeps the newest
checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_3d.app.config.save_interval import (
    AUTO,
    HOURS_BETWEEN_FAILURES,
    best_interval,
    check_save_interval,
)
from lightning_3d.layout.sizes import check_sizes
from lightning_3d.storage.remote_path import place

LEAST_STEPS, MOST_STEPS, SHARE = 50, 1000, 10
"""A fit is saved SHARE times, but at intervals of at least LEAST_STEPS and at most MOST_STEPS
optimizer steps."""


class PeriodicCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` that also saves the last step, and the step at which Ctrl-C or SIGTERM
    ends the fit.

    After an error nothing is saved, because the step may be incomplete. Earlier checkpoints stay.

    Args:
        dirpath: folder or URL; None as in `ModelCheckpoint`.
        every_n_train_steps: optimizer steps between saves. None: a tenth of the fit, at least 50
            and at most 1000. "auto": what costs least time with the measured times of a step and a
            save, and the expected failures, see `save_interval`.
        save_top_k: number of newest checkpoints to keep, or of best ones with `monitor`; -1 keeps
            all.
        keep_every_n_steps: of the older checkpoints, keep the first at or after each multiple of
            this many optimizer steps; None keeps none.
        hours_between_failures: hours that one rank is expected to run until it ends the job, for
            "auto".
        monitor: metric that decides which checkpoints to keep; None keeps the newest.
        options: further arguments of `ModelCheckpoint`.
    """

    def __init__(
        self,
        dirpath: Any = None,
        filename: str | None = "step_{step}",
        monitor: str | None = None,
        *,
        every_n_train_steps: int | str | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_top_k: int = 3,
        keep_every_n_steps: int | None = None,
        hours_between_failures: float = HOURS_BETWEEN_FAILURES,
        save_on_exception: bool = True,
        auto_insert_metric_name: bool = False,
        enable_version_counter: bool = False,
        **options: Any,
    ) -> None:
        self._keeps_newest = monitor is None
        check_save_interval("every_n_train_steps", every_n_train_steps)
        check_sizes(keep_every_n_steps=keep_every_n_steps)
        self.keep_every_n_steps = keep_every_n_steps
        self._measures = SaveTimes(hours_between_failures) if every_n_train_steps == AUTO else None
        every_n_train_steps = None if isinstance(every_n_train_steps, str) else every_n_train_steps
        self._saved_step = 0
        self._kept: set[str] = set()  # checkpoints that are not removed when newer ones come
        self._chooses_interval = (
            every_n_train_steps is every_n_epochs is train_time_interval is None
        )
        # Lightning counts checkpoints only if it can compare them by a number
        if monitor is None and save_top_k > 0:
            monitor, options["mode"] = "step", "max"
        super().__init__(
            dirpath,
            filename,
            monitor,
            every_n_train_steps=MOST_STEPS if self._chooses_interval else every_n_train_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=train_time_interval,
            save_top_k=save_top_k,
            save_on_exception=save_on_exception,
            auto_insert_metric_name=auto_insert_metric_name,
            enable_version_counter=enable_version_counter,
            **options,
        )

    @property
    @override
    def state_key(self) -> str:
        """Key of the callback's state.

        It leaves out the save interval, so that a fit resumed with a different interval still knows
        which checkpoints it keeps.
        """
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._chooses_interval:
            self._every_n_train_steps = interval(steps_of_fit(trainer))
        if self._measures is not None:
            self._measures.begin(trainer)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "saved_step": self._saved_step, "kept": sorted(self._kept)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(self._moved(state_dict) if self._keeps_newest else state_dict)
        self._saved_step = state_dict.get("saved_step", 0)
        self._kept = {self._here(path) for path in state_dict.get("kept", ())}

    def _here(self, path: str) -> str:
        """Return a path of a checkpoint in the folder of this fit, which may have been moved or
        copied since it was saved."""
        return str(place(self.dirpath) / place(path).name) if self.dirpath else path

    def _moved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state with those checkpoints that are in the folder of this fit."""
        known = {self._here(path): step for path, step in state["best_k_models"].items()}
        there = {path: step for path, step in known.items() if place(path).exists()}
        newest = max(there, key=lambda path: there[path], default=state["best_model_path"])
        # Checkpoints are compared by their step: the best is the newest.
        oldest = min(there, key=lambda path: there[path], default="")
        is_here = state["dirpath"] == self.dirpath
        return {
            **state,
            "dirpath": self.dirpath,
            "best_k_models": there,
            "best_model_path": newest,
            "kth_best_model_path": oldest,
            "last_model_path": state["last_model_path"] if is_here else "",
        }

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        every, step = self.keep_every_n_steps, trainer.global_step
        if every is not None and step // every > self._saved_step // every:
            self._kept.add(str(filepath))
        self._saved_step = step
        if self._measures is None:
            super()._save_checkpoint(trainer, filepath)
            return
        with self._measures.saving():
            super()._save_checkpoint(trainer, filepath)
        self._every_n_train_steps = self._measures.choose(trainer, self._every_n_train_steps)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, *args, **kwargs)
        if _ends_after_this_batch(trainer):
            self._save_newest(trainer)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if trainer.should_stop:  # as EarlyStopping decides
            self._save_newest(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if not isinstance(exception, SIGTERMException):
            return
        if self._keeps_newest and self._should_save_on_exception(trainer):
            self._save_newest(trainer)
        else:
            super().on_exception(trainer, pl_module, exception)

    @override
    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        """Return whether to remove a checkpoint that is no longer among the newest.

        Lightning 2.6 keeps the one that the fit resumed from, so a run that is restarted often
        would leave one each time.
        """
        if str(previous) in self._kept:
            return False
        if self._keeps_newest and "://" not in previous and self.dirpath is not None:
            return (
                previous != current
                and Path(self.dirpath).absolute() in Path(previous).absolute().parents
            )
        return super()._should_remove_checkpoint(trainer, previous, current)

    @override
    def _save_topk_checkpoint(
        self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]
    ) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        if not self._keeps_newest or self.save_top_k < 1:
            return
        kept = self.best_k_models
        by_age = sorted(kept, key=lambda path: kept[path])
        for path in by_age[: -self.save_top_k]:  # an earlier attempt of the run kept more
            del kept[path]
            if self._should_remove_checkpoint(trainer, path, self.best_model_path):
                self._remove_checkpoint(trainer, path)
        self.kth_best_model_path = min(kept, key=lambda path: kept[path], default="")

    def _save_newest(self, trainer: pl.Trainer) -> None:
        """Save this step, unless it is saved already or only the best checkpoints are kept."""
        if self._keeps_newest and not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)


def interval(steps: int | None) -> int:
    """Choose the optimizer steps between saves for a fit of `steps` steps; None: a fit without an
    end."""
    return MOST_STEPS if steps is None else min(MOST_STEPS, max(LEAST_STEPS, -(-steps // SHARE)))


def steps_of_fit(trainer: pl.Trainer) -> int | None:
    """Optimizer steps of a whole fit, if nothing ends it earlier; None if it has no end."""
    by_epochs = None
    if (
        trainer.max_epochs is not None
        and trainer.max_epochs > 0
        and trainer.num_training_batches != float("inf")
    ):
        by_epochs = trainer.max_epochs * -(
            -int(trainer.num_training_batches) // max(1, trainer.accumulate_grad_batches)
        )
    known = [
        steps
        for steps in (by_epochs, trainer.max_steps if trainer.max_steps > 0 else None)
        if steps is not None
    ]
    return min(known, default=None)


def _ends_after_this_batch(trainer: pl.Trainer) -> bool:
    """Return whether the batch that just ended is the last one, as far as is known now."""
    loop = trainer.fit_loop
    if trainer.should_stop or (trainer.max_steps > 0 and trainer.global_step >= trainer.max_steps):
        return True
    last_epoch = (
        trainer.max_epochs is not None
        and trainer.max_epochs > 0
        and trainer.current_epoch + 1 >= trainer.max_epochs
    )
    return last_epoch and bool(loop.epoch_loop.batch_progress.is_last_batch)


# Measures steps and saves of a fit, and chooses the interval between saves from them.

_CHANGE = 1.2
"""A new interval is used, and reported, only if it differs by this factor from the present one."""


class SaveTimes:
    """The times of steps and saves on this rank.

    Args:
        hours_between_failures: hours that one rank is expected to run until it ends the job.
    """

    def __init__(self, hours_between_failures: float) -> None:
        self._hours = hours_between_failures
        self._began, self._first_step = 0.0, 0
        self._saving = 0.0
        self._last = 0.0

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin to measure, at the start of a fit."""
        self._began, self._first_step, self._saving = time.monotonic(), trainer.global_step, 0.0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure a save: how long it holds up training, also while it waits for the end of the
        save before."""
        start = time.monotonic()
        yield
        self._last = time.monotonic() - start
        self._saving += self._last

    def choose(self, trainer: pl.Trainer, present: int) -> int:
        """Return the best interval after a save, the same on all ranks. Collective: the times of
        rank 0 count."""
        steps = trainer.global_step - self._first_step
        if steps < 1:
            return present
        step_seconds = (time.monotonic() - self._began - self._saving) / steps
        found = best_interval(step_seconds, self._last, trainer.world_size, self._hours)
        chosen = int(trainer.strategy.broadcast(found.steps))
        if max(chosen, present) < _CHANGE * min(chosen, present):
            return present
        rank_zero_info(found.words)
        return chosen
