"""What a checkpoint knows of the run that wrote it: its configuration, and what it is called at Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger

from lightning_3d.checkpoint.folder import read_manifest, read_trainer_state
from lightning_3d.errors import CheckpointError
from lightning_3d.remote_path import place

CONFIG, RUN_ID = "config", "wandb_run_id"


class RunRecord(pl.Callback):
    """Puts both into checkpoints."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[CONFIG] = dict(self._config)
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and logger.version is not None:
                checkpoint[RUN_ID] = logger.version


def same_run(loggers: Mapping[str, Any], resume: str | None) -> dict[str, Any]:
    """The group `logger`, of which Weights & Biases goes on with the run that wrote the checkpoint, unless another id is given.

    A checkpoint that cannot be read is refused where it is loaded, or replaced by another one there.
    """
    entries = dict(loggers)
    names = [name for name, entry in entries.items() if entry and str(entry.get("_target_")).endswith("WandbLogger")]
    if resume is None or not names:
        return entries
    try:
        run_id = read_trainer_state(place(resume), read_manifest(place(resume))).get(RUN_ID)
    except CheckpointError:
        return entries
    for name in names:
        if run_id is not None and not entries[name].get("id") and not entries[name].get("version"):
            entries[name] = {**entries[name], "id": run_id, "resume": "allow"}
    return entries
