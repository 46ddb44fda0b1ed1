"""The checkpoint that a command line names. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_3d.errors import CheckpointError
from lightning_3d.storage.checkpoint_names import (
    AVERAGE_DECAY,
    MANIFEST,
    checkpoints_in,
    no_average,
)
from lightning_3d.storage.remote_path import Place, RemotePath, place

CHECKPOINT = "a checkpoint, or a run folder (its newest checkpoint is used)"
AVERAGE = (
    "use the average of the weights that the run kept (trainer.average_decay), not the weights"
)
NO_VERIFY = "do not compare files with their hashes (the comparison reads all files)"


def find_checkpoint(name: str) -> Place:
    """Find the checkpoint that `name` stands for: itself, or the newest complete one in a run
    folder or below a URL.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    from lightning_3d.app.runs.checkpoints import newest_checkpoint

    path = place(name if "://" in name else Path(name).expanduser())
    if isinstance(path, RemotePath):
        found = [] if (path / MANIFEST).is_file() else checkpoints_in(path)
        return found[0] if found else path
    if (path / "config.yaml").is_file() and not (path / MANIFEST).is_file():
        newest = newest_checkpoint(path)
        if newest is None:
            raise CheckpointError(
                f"The run folder {path} has no complete checkpoint. Name a checkpoint, or a run"
                " that has saved one."
            )
        return place(newest)
    return path


def require_average(path: Place) -> None:
    """Refuse a checkpoint that has no average of weights, or a model folder.

    Raises:
        CheckpointError: with what keeps one.
    """
    try:
        described = json.loads((path / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        # no checkpoint, or a damaged one, which the command explains when it reads it
        described = {}
        if (path / MANIFEST).is_file():
            return
    if not isinstance(described, dict) or described.get(AVERAGE_DECAY) is None:
        raise CheckpointError(no_average(path))
