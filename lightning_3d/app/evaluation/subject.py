"""The model that a command evaluates: a checkpoint with the configuration of its run, or a folder
of Transformers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.app.config.tokenizer import tokenizer_of
from lightning_3d.app.runs.checkpoints import run_configuration
from lightning_3d.app.runs.folder import CONFIG_FILE
from lightning_3d.errors import CheckpointError
from lightning_3d.storage.checkpoint_names import MANIFEST, how_to_convert, recover
from lightning_3d.storage.remote_path import Place

HUGGING_FACE_CONFIG = "config.json"


@dataclass(frozen=True)
class Subject:
    """The model to evaluate.

    Attributes:
        path: the checkpoint, or the folder of Transformers.
        run: configuration of the run that wrote the checkpoint; None for a folder of Transformers.
    """

    path: Place
    run: Mapping[str, Any] | None

    @property
    def checkpoint(self) -> str | None:
        """Checkpoint that ranks load; None where the model reads its weights from a folder of
        Transformers."""
        return None if self.run is None else str(self.path)

    @property
    def folder(self) -> Path | None:
        """Folder of the run that wrote the checkpoint; None for a folder of Transformers, and for a
        checkpoint elsewhere."""
        around = (
            self.path.parents[:2] if isinstance(self.path, Path) and self.run is not None else ()
        )
        return next((folder for folder in around if (folder / CONFIG_FILE).is_file()), None)

    @property
    def tokenizer(self) -> str | None:
        """Tokenizer of the run, or of the folder; None if neither names one."""
        if self.run is None:
            return str(self.path)
        return tokenizer_of(self.run.get("model") or {}, self.run.get("data") or {})


def find_subject(path: Place, name: str) -> Subject:
    """Find out what a path holds.

    Args:
        path: a checkpoint, or a folder of Transformers.
        name: the path as the user wrote it, for messages.

    Raises:
        CheckpointError: there is nothing, it is neither of both, or nothing says which model a
            checkpoint has.
    """
    try:
        recover(path)
        if (path / MANIFEST).is_file():
            return Subject(path, _configuration(path, name))
        if isinstance(path, Path) and (path / HUGGING_FACE_CONFIG).is_file():
            return Subject(path.absolute(), None)
        if not path.exists():
            raise CheckpointError(
                f"There is no checkpoint {name}. Name a checkpoint, a run folder, or a model folder"
                " of Transformers."
            )
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror or error}.") from error
    raise CheckpointError(
        f"{name} is not a complete checkpoint (it has no {MANIFEST}), not the folder of a run, and"
        " not a model folder of Transformers (it has no"
        f" {HUGGING_FACE_CONFIG}).{how_to_convert(path)}"
    )


def _configuration(path: Place, name: str) -> Mapping[str, Any]:
    """Read the configuration of the run that wrote a checkpoint."""
    try:
        found = run_configuration(path)
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"The checkpoint {name} is damaged: {error}. Use another one."
        ) from error
    if found is not None:
        return found
    raise CheckpointError(
        f"Nothing says how to build the module of {name}: a run of lightning-3d train did not write"
        f" this checkpoint. Write its model with lightning-3d export {name} --output FOLDER, and"
        " use that folder."
    )
