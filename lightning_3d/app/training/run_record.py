"""The run that wrote a checkpoint: its configuration, also in the loggers that keep it, and its id
at Weights & Biases.

With the id, a job that is started again continues the same run there, also in steps of offline
files. With the configuration, keys that have changed since take effect.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim.lr_scheduler import LambdaLR

from lightning_3d.app.config.scheduler import KEY
from lightning_3d.app.runs.checkpoints import note_places, run_id
from lightning_3d.app.runs.folder import WANDB_FILE, read_wandb_file
from lightning_3d.app.runs.logger_packages import TRACKERS
from lightning_3d.app.runs.resumed_keys import differences
from lightning_3d.app.runs.wandb_access import SWEEP_VARIABLE, wandb_entries
from lightning_3d.app.training.wandb_logger import WandbLogger as OwnLogger
from lightning_3d.checkpoint import replace_groups
from lightning_3d.checkpoint.folder import read_manifest, read_trainer_state
from lightning_3d.compat.lightning_loggers import resume_csv_file
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.storage.checkpoint_names import RUN, is_of_a_run
from lightning_3d.storage.json_file import replace_text
from lightning_3d.storage.remote_path import place

if TYPE_CHECKING:
    import lightning.pytorch as pl

CONFIG, RUN_ID, NEXT_STEP = "config", "wandb_run_id", "wandb_next_step"


class RunRecord(pl.Callback):
    """Callback that records a run: its configuration and ids in checkpoints, its configuration in
    trackers of experiments, and in the run folder its id at Weights & Biases and the places of its
    checkpoints.
    """

    def __init__(
        self, config: Mapping[str, Any], named: Mapping[str, pl.Callback] | None = None
    ) -> None:
        self._config = config
        self._run: str | None = None  # rank 0, which writes manifests, has it
        self._named = named or {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for tracker in _trackers(trainer):
            tracker.log_hyperparams(dict(self._config))
        for logger in _runs_at_wandb(trainer):
            logger.log_hyperparams(dict(self._config))
            if trainer.is_global_zero:
                run = logger.experiment
                facts = {"id": run.id, "name": run.name, "group": run.group, "project": run.project}
                facts["url"] = None if run.offline else run.url
                replace_text(
                    Path(self._config["run_folder"]) / WANDB_FILE, json.dumps(facts) + "\n"
                )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            folder = Path(self._config["run_folder"])
            self._run = run_id(folder)
            note_places(
                folder,
                [
                    str(named)
                    for callback in trainer.checkpoint_callbacks
                    if (named := getattr(callback, "dirpath", None))
                ],
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            for logger in _csv_files(trainer):
                if Path(logger.log_dir).is_relative_to(self._config["run_folder"]):
                    resume_csv_file(logger, trainer.global_step)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        for csv_file in _csv_files(trainer):
            csv_file.save()  # otherwise a kill loses rows of steps that are not repeated
        checkpoint[CONFIG] = dict(self._config)
        if self._run is not None:
            checkpoint[RUN] = self._run
        for logger in _runs_at_wandb(trainer):
            if logger.version is not None:
                checkpoint[RUN_ID] = logger.version
            if isinstance(logger, OwnLogger):
                checkpoint[NEXT_STEP] = logger.next_step

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            follow_configuration(
                trainer, checkpoint, checkpoint.get(CONFIG), self._config, self._named
            )


def _trackers(trainer: pl.Trainer) -> list[Logger]:
    """Return the loggers of MLflow, Comet and Aim. Aim's class is in its own package, so names are
    compared."""
    return [
        logger
        for logger in trainer.loggers
        if any(kind.__name__ in TRACKERS for kind in type(logger).__mro__)
    ]


def _csv_files(trainer: pl.Trainer) -> list[CSVLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, CSVLogger)]


def _runs_at_wandb(trainer: pl.Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def same_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the group `logger`: entries of Weights & Biases get a run id, a name and tags,
    unless they set them.

    The run id is the one of an earlier start of this job, or of the run that wrote the checkpoint
    it resumes. Jobs of a sweep that resume one checkpoint are separate runs; their group is in the
    variable WANDB_RUN_GROUP.

    An unreadable checkpoint gives no id here: loading it raises the error, or falls back to another
    checkpoint.
    """
    loggers, entries = dict(config["logger"]), wandb_entries(config["logger"])
    if not entries:
        return loggers
    folder, swept = Path(config["run_folder"]), SWEEP_VARIABLE in os.environ
    saved = _state_in(config["trainer"]["resume"])
    run_id = read_wandb_file(folder).get("id") or (None if swept else saved.get(RUN_ID))
    tags = [
        config["model"].get("name"),
        config["model"]["config"]["model_type"],
        config["precision"]["name"],
    ]
    for name, entry in entries.items():
        left_open: dict[str, Any] = {"name": f"{folder.parent.name}/{folder.name}"}
        left_open["id"] = None if entry.get("version") else run_id
        used = entry.get("id") or entry.get("version") or run_id
        if (
            used is not None
            and used == saved.get(RUN_ID)
            and entry["_target_"] == f"{OwnLogger.__module__}.{OwnLogger.__name__}"
        ):
            left_open["first_step"] = saved.get(NEXT_STEP)  # Lightning's logger does not have it
        known = {
            key: value
            for key, value in left_open.items()
            if value is not None and not entry.get(key)
        }
        loggers[name] = {
            **entry,
            **known,
            "tags": list(dict.fromkeys([*(entry.get("tags") or ()), *filter(None, tags)])),
        }
    return loggers


def _state_in(checkpoint: str | None) -> dict[str, Any]:
    if checkpoint is None:
        return {}
    try:
        return read_trainer_state(place(checkpoint), read_manifest(place(checkpoint)))
    except CheckpointError:
        return {}


# What a configuration says wins over what a checkpoint restores, where the two differ.
# Lightning restores the values of an optimizer, a schedule and callbacks as they were saved.
# Without this, a run that resumes a checkpoint with other values would ignore them. Where nothing
# differs, everything is restored as it was.


def follow_configuration(
    trainer: pl.Trainer,
    checkpoint: dict[str, Any],
    before: Any,
    now: Mapping[str, Any],
    callbacks: Mapping[str, Callback],
) -> None:
    """Change what Lightning is about to restore to what the configuration says.

    Args:
        checkpoint: Lightning's dict, which is changed.
        before: configuration of the run that saved it; None if it has none: then all of the
            optimizer is restored as it was saved.
        now: configuration of this run.
        callbacks: callbacks of the group `callbacks`, by name.
    """
    states = checkpoint.get("callbacks") or {}
    for timer in (callback for callback in trainer.callbacks if isinstance(callback, Timer)):  # type: ignore[attr-defined]
        if timer not in callbacks.values():
            # trainer.max_time is the time of this start, not of all starts together
            states.pop(timer.state_key, None)
    if not is_of_a_run(before):
        rank_zero_warn(
            "The checkpoint has no configuration, so its hyperparameters are used, not those of the"
            " group optimizer."
        )
        return
    if _trains_differently(before, now) and checkpoint.get("optimizer_states"):
        _use_own_optimizer(trainer, checkpoint)
    for name, callback in callbacks.items():
        state = states.get(callback.state_key)
        # which knows another folder by `dirpath`
        if isinstance(state, dict) and not isinstance(callback, Checkpoint):
            _use_own_arguments(
                callback, state, (before.get("callbacks") or {}).get(name), now["callbacks"][name]
            )


def _trains_differently(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether hyperparameters or the schedule differ. A schedule of our own also depends on the
    length of the run."""
    if any(differences(before["optimizer"], now["optimizer"])):
        return True
    return bool(before["trainer"]["max_steps"] != now["trainer"]["max_steps"])


def _use_own_optimizer(trainer: pl.Trainer, checkpoint: dict[str, Any]) -> None:
    """Keep the hyperparameters with which the optimizer was built, and move its schedule to the
    step of the checkpoint."""
    saved = checkpoint.get("lr_schedulers") or []
    steps = int(saved[0]["last_epoch"] if saved else checkpoint["global_step"])
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    for scheduler in schedulers:
        _move(scheduler, steps)
    described = trainer.strategy.optimizer_state(trainer.optimizers[0])
    replace_groups(checkpoint, described, [scheduler.state_dict() for scheduler in schedulers])


def _move(scheduler: Any, steps: int) -> None:
    """Move a new scheduler to a step, as if it had been there in all steps before.

    Raises:
        ConfigError: the schedule ends before this step.
    """
    if type(scheduler) is LambdaLR and steps > 0:
        scheduler.last_epoch = steps - 1  # its learning rate depends on nothing else
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            while scheduler.last_epoch < steps:
                scheduler.step()
    except ValueError as error:
        raise ConfigError(f"{KEY} cannot be resumed at step {steps}: {error}") from error


def _use_own_arguments(callback: Callback, state: dict[str, Any], before: Any, now: Any) -> None:
    """Leave changed arguments of a callback as they are where its state would restore them, as
    `EarlyStopping` does with its patience."""
    for key, _, value in differences(before, now):
        if key in state:
            state[key] = getattr(callback, key, value)
