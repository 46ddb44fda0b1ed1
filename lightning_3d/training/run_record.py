"""What a checkpoint knows of the run that wrote it: its configuration, and what it is called at Weights & Biases; and how that run is found
again, so that one job has one run there, however often it is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

from lightning_3d.checkpoint.folder import read_manifest, read_trainer_state
from lightning_3d.errors import CheckpointError
from lightning_3d.runs.folder import WANDB_FILE, read_wandb_file
from lightning_3d.runs.wandb_access import SWEEP_VARIABLE, wandb_entries
from lightning_3d.storage.remote_path import place

CONFIG, RUN_ID = "config", "wandb_run_id"


class RunRecord(pl.Callback):
    """Puts both into checkpoints, the configuration into the run at Weights & Biases, and the id of that run into the run folder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for logger in _runs_at_wandb(trainer):
            logger.log_hyperparams(dict(self._config))
            if trainer.is_global_zero:
                run = logger.experiment
                told = {"id": run.id, "name": run.name, "group": run.group, "project": run.project}
                told["url"] = None if run.offline else run.url
                (Path(self._config["run_folder"]) / WANDB_FILE).write_text(json.dumps(told) + "\n", encoding="utf-8")

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG] = dict(self._config)
        for logger in _runs_at_wandb(trainer):
            if logger.version is not None:
                checkpoint[RUN_ID] = logger.version


def _runs_at_wandb(trainer: pl.Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)]


def same_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The group `logger`, in which entries of Weights & Biases have what they leave open: the id of the run that this job began when it was
    started before, or that wrote the checkpoint it goes on from; a name, and tags.

    Jobs of a sweep that all go on from one checkpoint are runs of their own; their group is in the variable WANDB_RUN_GROUP.

    A checkpoint that cannot be read is refused where it is loaded, or replaced by another one there.
    """
    loggers, entries = dict(config["logger"]), wandb_entries(config["logger"])
    if not entries:
        return loggers
    folder, swept = Path(config["run_folder"]), SWEEP_VARIABLE in os.environ
    run_id = read_wandb_file(folder).get("id") or (None if swept else _id_in(config["trainer"]["resume"]))
    tags = [config["model"].get("name"), config["model"]["config"]["model_type"], config["precision"]["name"]]
    for name, entry in entries.items():
        left_open = {"name": f"{folder.parent.name}/{folder.name}", "id": None if entry.get("version") else run_id}
        known = {key: value for key, value in left_open.items() if value is not None and not entry.get(key)}
        loggers[name] = {**entry, **known, "tags": list(dict.fromkeys([*(entry.get("tags") or ()), *filter(None, tags)]))}
    return loggers


def _id_in(checkpoint: str | None) -> str | None:
    if checkpoint is None:
        return None
    try:
        return read_trainer_state(place(checkpoint), read_manifest(place(checkpoint))).get(RUN_ID)
    except CheckpointError:
        return None
