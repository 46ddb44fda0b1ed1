"""A checkpoint in an object store, which has no folders and no rename.

    s3://bucket/run/step_10.ckpt/manifest.json                      names the folder of the others
    s3://bucket/run/step_10.ckpt/lightning_3d-3f2a.../.metadata, ...

Every save has a separate folder, so it does not touch earlier files. The manifest comes last, in
one request that replaces the earlier manifest or does nothing: that is the commit. Then the files
of the earlier checkpoint are removed.
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
    """Choose the folder for the files of a save."""
    remove_remains([path])
    return path / f"lightning_3d-{uuid.uuid4().hex[:16]}"


def publish(path: RemotePath, manifest: bytes) -> None:
    """Turn the written files into a checkpoint and remove the earlier one; if that fails, the next
    save removes it."""
    (path / MANIFEST).write_bytes(manifest)
    try:
        remove_remains([path])
    except OSError as error:
        log.warning("the earlier checkpoint at %s could not be removed: %s", path, error)


def remove(path: RemotePath) -> None:
    """Remove a checkpoint. The manifest goes first, so that what is left is not a checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    path.remove_tree()


def remove_remains(paths: Iterable[RemotePath]) -> None:
    """Remove the folders of unfinished saves, which no manifest names."""
    for path in paths:
        left = [folder for folder in path.iterdir() if _FOLDER.fullmatch(folder.name)]
        if not left:
            continue
        try:
            named = data_folder((path / MANIFEST).read_text())
        except FileNotFoundError:
            named = ""
        except ValueError:  # damaged, so the folder that it named is unknown
            continue
        for folder in left:
            if folder.name != named:
                folder.remove_tree()


def missing(folder: RemotePath, wanted: dict[str, int]) -> dict[str, int | None]:
    """Find files with a wrong size: name to size, or None if the file is missing.

    One listing, and one request for each file that it does not show: a listing may be out of date.
    """
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
