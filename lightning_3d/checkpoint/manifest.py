"""What a manifest must contain, so that whoever reads it can rely on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_3d.errors import CheckpointError
from lightning_3d.storage.remote_path import Place

_TEXTS = ("layout", "schedule", "precision", "source", "data", "run")
_NUMBERS = ("version", "zero_stage", "global_step", "epoch")


def check_manifest(path: Place, manifest: Mapping[str, Any]) -> None:
    """Refuse a manifest that no save of this package wrote: its hash only shows that nothing has
    changed it by accident.

    Raises:
        CheckpointError: an entry is missing, has another type, or names a file outside the folder
            of the checkpoint.
    """
    wrong = next(
        (name for name in _TEXTS if name in manifest and not isinstance(manifest[name], str)), None
    )
    wrong = wrong or next(
        (name for name in _NUMBERS if name in manifest and type(manifest[name]) is not int), None
    )
    if wrong is None and "version" not in manifest:
        wrong = "version"
    if wrong is None and not _are_files(manifest.get("files")):
        wrong = "files"
    models = manifest.get("transformers", {})
    if wrong is None and not (
        isinstance(models, dict)
        and all(isinstance(model, dict) and "class" in model for model in models.values())
    ):
        wrong = "transformers"
    if wrong is not None:
        raise CheckpointError(
            f"The manifest of {path} has no valid {wrong}: the checkpoint is damaged. Use another"
            " one."
        )
    data = manifest.get("data", "")
    outside = [name for name in (*manifest["files"], data) if not is_inside(name)]
    outside = outside or [name for name in manifest["files"] if not _leads_inside(path, data, name)]
    if outside:
        raise CheckpointError(
            f"The manifest of {path} names {outside[0]!r}, which is outside its folder, so nothing"
            " is loaded from it."
        )


def is_inside(name: str) -> bool:
    """Check whether a relative path stays in its folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _leads_inside(folder: Place, data: str, name: str) -> bool:
    """Check whether a file is in its folder if symbolic links are followed; on a remote store there
    are none."""
    # realpath, because Path.resolve raises for a link that leads to itself; the read says what is
    # wrong with such a file.
    return not isinstance(folder, Path) or Path(
        os.path.realpath(folder / data / name)
    ).is_relative_to(os.path.realpath(folder))


def _are_files(files: Any) -> bool:
    return isinstance(files, dict) and all(
        isinstance(known, dict)
        and known.keys() == {"bytes", "sha256"}
        and type(known["bytes"]) is int
        and isinstance(known["sha256"], str)
        for known in files.values()
    )
