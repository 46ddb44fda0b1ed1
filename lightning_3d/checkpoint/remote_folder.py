"""A checkpoint in an object store, which has no folders and no rename.

    s3://bucket/run/step_10.ckpt/manifest.json                      names the folder of the others
    s3://bucket/run/step_10.ckpt/lightning_3d-3f2a.../.metadata, ...

Every save has a folder of its own, so that it touches nothing of what was there. The manifest comes last and is one request, which
replaces the one before or does nothing: that is the commit. Then the files of the one before are removed.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Iterable

from lightning_3d.storage.checkpoint_names import MANIFEST, data_folder
from lightning_3d.storage.remote_path import RemotePath

_FOLDER = re.compile(r"lightning_3d-[0-9a-f]{16}")
log = logging.getLogger(__name__)


def begin(path: RemotePath) -> RemotePath:
    """Where a save puts its files."""
    remove_remains([path])
    return path / f"lightning_3d-{uuid.uuid4().hex[:16]}"


def publish(path: RemotePath, manifest: bytes) -> None:
    """Make what was written a checkpoint. What was there before is removed; where that fails, the next save does it."""
    (path / MANIFEST).write_bytes(manifest)
    try:
        remove_remains([path])
    except OSError as error:
        log.warning("what was at %s before could not be removed: %s", path, error)


def remove(path: RemotePath) -> None:
    """It is no checkpoint any more when its manifest is gone, which is first."""
    (path / MANIFEST).unlink(missing_ok=True)
    path.remove_tree()


def remove_remains(paths: Iterable[RemotePath]) -> None:
    """Remove what unfinished saves have left: folders of saves that no manifest names."""
    for path in paths:
        left = [folder for folder in path.iterdir() if _FOLDER.fullmatch(folder.name)]
        if not left:
            continue
        try:
            named = data_folder((path / MANIFEST).read_text())
        except FileNotFoundError:
            named = ""
        except ValueError:  # damaged, so nothing tells what it named
            continue
        for folder in left:
            if folder.name != named:
                folder.remove_tree()


def missing(folder: RemotePath, wanted: dict[str, int]) -> dict[str, int | None]:
    """Files that have another size, and that size; None where there is none. One listing, and a question for each that it does not show:
    it may lag behind."""
    listed = folder.sizes()
    wrong: dict[str, int | None] = {}
    for name, size in wanted.items():
        if listed.get(name) != size:
            try:
                found: int | None = (folder / name).size()
            except FileNotFoundError:
                found = None
            if found != size:
                wrong[name] = found
    return wrong
