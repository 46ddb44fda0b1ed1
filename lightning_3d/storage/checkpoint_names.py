"""Which folders are checkpoints, by their names alone. Imports no torch: launchers look for checkpoints too.

A save fills `.NAME.saving`, whose last file is the manifest, and one rename makes it NAME. Where NAME was there before, the two
change places in one step; file systems that cannot do so need two renames, with the old one as `.NAME.replaced` between them. Nothing
whose name begins with a dot is a checkpoint. At a URL nothing is renamed: the manifest says in which folder
the other files are, and is what makes NAME a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from lightning_3d.storage.remote_path import Place, RemotePath

MANIFEST = "manifest.json"
SAVING, REPLACED, REMOVED = "saving", "replaced", "removed"


def aside(path: Path, purpose: str) -> Path:
    """Where the folder `path` is while it is saved, replaced or removed."""
    return path.with_name(f".{path.name}.{purpose}")


def data_folder(manifest: str) -> str:
    """The folder in a checkpoint where a manifest says that its files are; "" for those beside it.

    Raises:
        ValueError: it is no manifest.
    """
    known = json.loads(manifest)
    if not isinstance(known, dict):
        raise ValueError("no manifest")
    return str(known.get("data", ""))


def how_to_convert(path: Place) -> str:
    """A sentence for a path that looks like the checkpoint of another program; empty for others."""
    if isinstance(path, RemotePath):
        return ""
    names = ("meta.pt", "latest", "*_model_states.pt", "checkpoint/*_model_states.pt")
    looks = path.is_file() or any(next(path.glob(name), None) for name in names)
    return f" One of Lightning or DeepSpeed is converted by: lightning-3d import {path} --output NEW" if looks else ""


def recover(path: Path | RemotePath) -> None:
    """Finish what a process that was killed between two renames had begun. Any process may do so, several at once."""
    if isinstance(path, RemotePath):
        return
    before, after = aside(path, REPLACED), aside(path, SAVING)
    if not os.path.lexists(path) and before.exists():
        (after if (after / MANIFEST).is_file() else before).rename(path)


def recover_all(folder: Path) -> None:
    """`recover` for all checkpoints in a folder."""
    for before in folder.glob(f".*.{REPLACED}"):
        try:
            recover(before.with_name(before.name[1:].removesuffix(f".{REPLACED}")))
        except FileNotFoundError:  # another process has done it
            continue


def checkpoints_in(folder: Place) -> list[Place]:
    """Checkpoints that were completed, the one with the most steps first, of equal ones the latest."""
    return [path for _, path in sorted(_found(folder), key=lambda found: (found[0], str(found[1])), reverse=True)]


def steps_of(checkpoint: Place) -> int:
    """Raises ValueError or OSError: it is none."""
    return int(json.loads((checkpoint / MANIFEST).read_text("utf-8"))["global_step"])


def manifests_in(folder: Place) -> Iterator[Place]:
    """Of all checkpoints in a folder that were completed."""
    if isinstance(folder, RemotePath):
        named = (entry / MANIFEST for entry in folder.iterdir() if not entry.name.startswith("."))
        yield from (manifest for manifest in named if manifest.is_file())
    else:
        yield from folder.glob(f"[!.]*/{MANIFEST}")


def _found(folder: Place) -> Iterator[tuple[tuple[int, float], Place]]:
    for manifest in manifests_in(folder):
        try:
            written = manifest.modified() if isinstance(manifest, RemotePath) else manifest.stat().st_mtime
            yield (steps_of(manifest.parent), written), manifest.parent
        except (OSError, ValueError, KeyError, TypeError):  # being removed, or not ours
            continue
