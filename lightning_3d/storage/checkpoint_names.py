"""Find checkpoints by the names of their folders alone. Imports no torch: launchers look for
checkpoints too.

A save fills `.NAME.saving`, with the manifest as the last file, and then renames it to NAME. If
NAME exists, the two are exchanged in one step; file systems that cannot exchange need two renames,
between which the old one is `.NAME.replaced`. A folder whose name begins with a dot is not a
checkpoint. At a URL nothing is renamed: the manifest names the folder with the other files, and
NAME is a checkpoint once its manifest exists.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.storage.remote_path import Place, RemotePath

MANIFEST, TRAINER = "manifest.json", "trainer.json"
AVERAGE_DECAY = "average_decay"
"""Key of a manifest: decay of the average of weights in the checkpoint. Missing if there is
none."""
RUN = "run"
"""Key of a manifest: id of the run of the command line that wrote the checkpoint. Missing if
another program did."""
SAVING, REPLACED, REMOVED = "saving", "replaced", "removed"


def aside(path: Path, purpose: str) -> Path:
    """Return the place of the folder `path` while it is saved, replaced or removed."""
    return path.with_name(f".{path.name}.{purpose}")


def data_folder(manifest: str) -> str:
    """Read from a manifest in which folder of the checkpoint its files are; "" if they are next to
    the manifest.

    Raises:
        ValueError: it is not a manifest.
    """
    known = json.loads(manifest)
    if not isinstance(known, dict):
        raise ValueError("not a manifest")  # noqa: TRY004
    return str(known.get("data", ""))


def how_to_convert(path: Place) -> str:
    """Explain how to convert a path that looks like the checkpoint of another program; empty for
    others."""
    if isinstance(path, RemotePath):
        return ""
    names = ("meta.pt", "latest", "*_model_states.pt", "checkpoint/*_model_states.pt")
    looks = path.is_file() or any(next(path.glob(name), None) for name in names)
    return (
        f" To convert a checkpoint of Lightning or DeepSpeed: lightning-3d import {path}"
        " --output NEW"
        if looks
        else ""
    )


def no_average(path: object) -> str:
    """Explain that a checkpoint has no average of weights."""
    return (
        f"{path} has no average of weights. A run with trainer.average_decay=0.999 keeps one, and"
        " so does the callback lightning_3d.ExponentialAverage. Use the weights themselves."
    )


def recover(path: Path | RemotePath) -> None:
    """Finish the save of a process that was killed between two renames. Any process may do this,
    several at once."""
    if isinstance(path, RemotePath):
        return
    before, after = aside(path, REPLACED), aside(path, SAVING)
    if not os.path.lexists(path) and before.exists():
        (after if (after / MANIFEST).is_file() else before).rename(path)


def recover_all(folder: Path) -> None:
    """Run `recover` for all checkpoints in a folder."""
    for before in folder.glob(f".*.{REPLACED}"):
        try:
            recover(before.with_name(before.name[1:].removesuffix(f".{REPLACED}")))
        except FileNotFoundError:  # another process has done it
            continue


@dataclass(frozen=True, order=True)
class FoundCheckpoints:
    """A complete checkpoint that was found in a folder.

    Attributes:
        steps: its optimizer step.
        written: time of its end, in seconds since the epoch.
        path: where it is.
        run: id of the run that wrote it; empty if that was not a run of the command line.
    """

    steps: int
    written: float
    path: Place
    run: str


def found_in(folder: Place) -> list[FoundCheckpoints]:
    """Find the complete checkpoints in a folder, most steps first; with equal steps, the latest
    first."""
    return sorted(_found(folder), reverse=True)


def checkpoints_in(folder: Place) -> list[Place]:
    """List the complete checkpoints in a folder, in the order of `found_in`."""
    return [found.path for found in found_in(folder)]


def steps_of(checkpoint: Place) -> int:
    """Read the optimizer step of a checkpoint. Raises ValueError or OSError if it is not a
    checkpoint."""
    return int(json.loads((checkpoint / MANIFEST).read_text("utf-8"))["global_step"])


def saved_config(checkpoint: Place) -> dict[str, Any] | None:
    """Read the configuration of the run that saved a checkpoint; None if it has none, or cannot be
    read."""
    try:
        inside = data_folder((checkpoint / MANIFEST).read_text("utf-8"))
        state = json.loads(
            ((checkpoint / inside if inside else checkpoint) / TRAINER).read_text("utf-8"),
            object_hook=_plain,
        )
    except (OSError, ValueError):
        return None
    config = state.get("config") if isinstance(state, dict) else None
    return config if is_of_a_run(config) else None


def is_of_a_run(config: Any) -> bool:
    """Check whether an entry "config" of a checkpoint is the configuration of a run: a module of a
    user may have one of its own."""
    return (
        isinstance(config, dict)
        and isinstance(config.get("optimizer"), dict)
        and isinstance(config.get("trainer"), dict)
    )


def _plain(packed: dict[str, Any]) -> Any:
    """Return the value that the JSON of a checkpoint stores as an object with one key."""
    if packed.keys() == {"$float"}:
        return float(packed["$float"])
    return packed["$tuple"] if packed.keys() == {"$tuple"} else packed


def manifests_in(folder: Place) -> Iterator[Place]:
    """Yield the manifests of all complete checkpoints in a folder."""
    if isinstance(folder, RemotePath):
        named = (entry / MANIFEST for entry in folder.iterdir() if not entry.name.startswith("."))
        yield from (manifest for manifest in named if manifest.is_file())
    else:
        yield from folder.glob(f"[!.]*/{MANIFEST}")


def _found(folder: Place) -> Iterator[FoundCheckpoints]:
    for manifest in manifests_in(folder):
        try:
            written = (
                manifest.modified()
                if isinstance(manifest, RemotePath)
                else manifest.stat().st_mtime
            )
            known = json.loads(manifest.read_text("utf-8"))
            yield FoundCheckpoints(
                int(known["global_step"]), written, manifest.parent, str(known.get(RUN, ""))
            )
        except (OSError, ValueError, KeyError, TypeError):  # it is being removed, or not ours
            continue
