"""Checkpoints of a run: the one place that knows where they are, and which are its own. Imports no
torch.

A run may save outside of its folder (`dirpath` of a callback), where other runs may save too.
Therefore the manifest of a checkpoint has the id of its run, and the run folder keeps this id and
every place where the run has saved.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.app.config.stored_config import as_now
from lightning_3d.app.config.stored_paths import absolute
from lightning_3d.errors import ConfigError, plural
from lightning_3d.storage.checkpoint_names import FoundCheckpoints, found_in, recover_all
from lightning_3d.storage.json_file import replace_text
from lightning_3d.storage.remote_path import Place, place

CHECKPOINTS = "checkpoints"
_RUN_FILE, _CONFIG_FILE = ".run.json", "config.yaml"
_KEEPS_NAMES = "enable_version_counter"
"""Argument of a `ModelCheckpoint` that gives a checkpoint another name where its own is taken. It
is false for `PeriodicCheckpoint`."""


def run_id(folder: Path) -> str:
    """Return the id of the run in a folder. The first call chooses it."""
    known = _read(folder)
    if not known["id"]:
        known["id"] = uuid.uuid4().hex
        replace_text(folder / _RUN_FILE, json.dumps(known) + "\n")
    return str(known["id"])


def note_places(folder: Path, places: Iterable[str]) -> None:
    """Note where the run in a folder saves from now on. Earlier places stay noted. Those in the run
    folder move with it."""
    known = _read(folder)
    inside = f"{folder.resolve()}/"
    noted = dict.fromkeys([*known["places"], *(where.removeprefix(inside) for where in places)])
    if list(noted) != known["places"]:
        known["places"] = list(noted)
        replace_text(folder / _RUN_FILE, json.dumps(known) + "\n")


def own_checkpoints(folder: Path) -> list[FoundCheckpoints]:
    """Find the complete checkpoints of the run in a folder, wherever they are, most steps first.

    All in the run folder are its own, also copied ones. Elsewhere, those are that have its id.

    Raises:
        ConfigError: a place cannot be listed, for example because the store behind a URL does not
            answer.
    """
    own = _read(folder)["id"]
    found: list[FoundCheckpoints] = []
    try:
        for where in _places(folder):
            inside = _is_inside(where, folder)
            if isinstance(where, Path):
                recover_all(where)
            found += [each for each in found_in(where) if inside or (own and each.run == own)]
    except OSError as error:
        raise ConfigError(f"Cannot list the checkpoints of the run in {folder}: {error}") from error
    return sorted(found, key=lambda each: each.steps, reverse=True)


def newest_checkpoint(folder: Path) -> str | None:
    """Find the complete checkpoint with the most steps of the run in a folder; None if there is
    none. Raises as `own_checkpoints`."""
    found = own_checkpoints(folder)
    return str(found[0].path) if found else None


def refuse_others(folder: Path, callbacks: Mapping[str, Any], resumed: str | None) -> None:
    """Refuse a run that would replace or remove checkpoints of another run.

    Those up to the step that it resumes, in the same place, are its past.

    Args:
        folder: run folder.
        callbacks: group `callbacks` of the configuration.
        resumed: checkpoint that the run resumes; None for a new run.

    Raises:
        ConfigError: with a place that works.
    """
    own = _read(folder)["id"]
    for name, entry in callbacks.items():
        where = _dirpath(entry)
        if (
            where is None
            or _is_inside(where, folder)
            or entry.get(_KEEPS_NAMES, "Periodic" not in str(entry.get("_target_")))
        ):
            continue
        try:
            found = found_in(where)
        except OSError as error:
            raise ConfigError(
                f"Cannot list the checkpoints in {where} (callbacks.{name}.dirpath): {error}"
            ) from error
        past = next(
            (
                each.steps
                for each in found
                if resumed is not None and _is_same(each.path, place(resumed))
            ),
            -1,
        )
        others = [each for each in found if not (own and each.run == own) and each.steps > past]
        if others:
            raise ConfigError(
                f"{where} (callbacks.{name}.dirpath) already has"
                f" {plural(len(others), 'checkpoint')} of another run, such as {others[0].path},"
                " which this run would replace or remove. Use a folder of its own, for example"
                f" callbacks.{name}.dirpath={where / folder.name}. To continue from there, set"
                f" trainer.resume={others[0].path}."
            )


def run_configuration(checkpoint: Place) -> dict[str, Any] | None:
    """Read the configuration of the run that wrote a checkpoint: from the checkpoint, else from the
    run folder around it; None without.

    Raises:
        OSError, ValueError, AttributeError: the checkpoint is damaged.
    """
    inside = checkpoint / str(
        json.loads((checkpoint / "manifest.json").read_text("utf-8")).get("data", "")
    )
    stored = json.loads((inside / "trainer.json").read_text("utf-8"))
    # written so where a key is not a word
    entries = dict(stored["$items"]) if "$items" in stored else stored
    if isinstance(entries.get("config"), dict):
        return as_now(entries["config"])
    around = checkpoint.parents[:2] if isinstance(checkpoint, Path) else ()
    folder = next((folder for folder in around if (folder / _CONFIG_FILE).is_file()), None)
    return None if folder is None else _configuration(folder)


def _places(folder: Path) -> Iterator[Place]:
    """Yield each place once where the run in a folder saves or has saved."""
    noted: list[Place] = [
        place(text) if "://" in text else folder / text for text in _read(folder)["places"]
    ]
    named = [_dirpath(entry) for entry in (_configuration(folder).get("callbacks") or {}).values()]
    seen = set()
    for where in [folder.absolute() / CHECKPOINTS, *noted, *named]:
        if where is not None and (known := _resolved(where)) not in seen:
            seen.add(known)
            yield where


def _configuration(folder: Path) -> dict[str, Any]:
    """Read the configuration in a run folder; empty where that cannot be read."""
    try:
        found = yaml.safe_load((folder / _CONFIG_FILE).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return as_now(found) if isinstance(found, dict) else {}


def _dirpath(entry: Any) -> Place | None:
    """Return where an entry of the group `callbacks` writes checkpoints; None if it does not
    say."""
    named = entry.get("dirpath") if isinstance(entry, Mapping) else None
    return place(absolute(str(named))) if named else None


def _read(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / _RUN_FILE).read_text("utf-8"))
        return {"id": str(found["id"]), "places": [str(text) for text in found["places"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return {"id": "", "places": []}


def _is_inside(where: Place, folder: Path) -> bool:
    return isinstance(where, Path) and where.resolve().is_relative_to(folder.resolve())


def _is_same(one: Place, other: Place) -> bool:
    return _resolved(one) == _resolved(other)


def _resolved(where: Place) -> Place:
    return where.resolve() if isinstance(where, Path) else where
