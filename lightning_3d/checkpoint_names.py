"""Which folders are checkpoints, by their names alone. Imports no torch: launchers look for checkpoints too.

A save fills `.NAME.saving`, whose last file is the manifest, and one rename makes it NAME. Where NAME was there before, the two
change places in one step; file systems that cannot do so need two renames, with the old one as `.NAME.replaced` between them. Nothing
whose name begins with a dot is a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
SAVING, REPLACED, REMOVED = "saving", "replaced", "removed"


def aside(path: Path, purpose: str) -> Path:
    """Where the folder `path` is while it is saved, replaced or removed."""
    return path.with_name(f".{path.name}.{purpose}")


def recover(path: Path) -> None:
    """Finish what a process that was killed between two renames had begun. Any process may do so, several at once."""
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


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints that were completed, the one with the most steps first, of equal ones the latest."""
    return [path for _, path in sorted(_found(folder), reverse=True)]


def _found(folder: Path) -> Iterator[tuple[tuple[int, float], Path]]:
    for manifest in folder.glob(f"[!.]*/{MANIFEST}"):
        try:
            yield (int(json.loads(manifest.read_text("utf-8"))["global_step"]), manifest.stat().st_mtime), manifest.parent
        except (OSError, ValueError, KeyError, TypeError):  # being removed, or not ours
            continue
