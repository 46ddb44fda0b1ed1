"""A checkpoint on disk: one folder that is complete or absent.

    epoch=0-step=10.ckpt/
        manifest.json                        what wrote it, and size and SHA-256 of every other file
        trainer.json, trainer.safetensors    Lightning's state, and the tensors in it
        .metadata, __0_0.distcp, ...         weights and optimizer state, by torch.distributed.checkpoint

A save fills a folder next to it (`checkpoint_names`); the manifest comes last, and one rename makes
the folder a checkpoint. The next save removes what a killed save left. At a URL nothing is renamed:
the manifest itself makes the checkpoint complete, and names the folder of the other files
(`remote_folder`).
"""  # noqa: E501

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from lightning_3d.checkpoint import remote_folder as remote
from lightning_3d.checkpoint.hashes import FileSum, HashedFile, find_damage, flush
from lightning_3d.checkpoint.json_state import Packer, unpack
from lightning_3d.checkpoint.manifest import check_manifest
from lightning_3d.errors import CheckpointError, StorageError, did_you_mean, listed, reason
from lightning_3d.storage.checkpoint_names import (
    MANIFEST,
    REMOVED,
    REPLACED,
    SAVING,
    TRAINER,
    aside,
    checkpoints_in,
    how_to_convert,
    manifests_in,
    recover,
    recover_all,
)
from lightning_3d.storage.json_file import parse_json, read_text
from lightning_3d.storage.remote_path import Place, RemotePath

TRAINER_TENSORS = "trainer.safetensors"
FORMAT, VERSION = "lightning_3d", 1
_OWN_HASH = "sha256"

Files = dict[str, FileSum]

log = logging.getLogger(__name__)


# Writing. One rank calls these functions.


def begin(
    path: Place, trainer_state: Mapping[str, Any], *, alone: bool = True
) -> tuple[Place, Files]:
    """Make the temporary folder for a checkpoint at `path`, with Lightning's state in it.

    Args:
        alone: whether no other process writes into the folder of `path`. If True, what killed saves
            left there is removed.

    Returns:
        The folder, and the hashes of its files.

    Raises:
        CheckpointError: `path` is a folder with other contents, which the checkpoint would replace.
    """
    folder = remote.begin(path) if isinstance(path, RemotePath) else _make_folder(path, alone=alone)
    packer = Packer()
    packed = packer.pack_entries(trainer_state)
    if packer.left_out:
        warnings.warn(
            f"Checkpoint {path.name} leaves out what is not plain data:"
            f" {'; '.join(packer.left_out)}.",
            stacklevel=2,
        )
    files = {TRAINER: _write(folder / TRAINER, _json(packed))}
    if packer.tensors:
        files[TRAINER_TENSORS] = _write(folder / TRAINER_TENSORS, to_safetensors(packer.tensors))
    return folder, files


def _make_folder(path: Path, *, alone: bool) -> Path:
    if alone and path.parent.is_dir():
        recover_all(path.parent)
        for purpose in (SAVING, REPLACED, REMOVED):
            for left in path.parent.glob(f".*.{purpose}"):
                _clear(left)
    if (
        path.is_dir()
        and not path.is_symlink()
        and not (path / MANIFEST).is_file()
        and any(path.iterdir())
    ):
        raise CheckpointError(
            f"{path} is a folder that is not a checkpoint, so it is not replaced. Choose a new"
            " path, for example inside this folder."
        )
    folder = aside(path, SAVING)
    _delete(folder)
    folder.mkdir(parents=True)
    return folder


def commit(folder: Place, path: Place, about: Mapping[str, Any], files: Files) -> None:
    """Check that all files are complete, write the manifest and rename the folder to its final
    name.

    What was at `path` before is kept until the new one is in its place.
    """
    _require_sizes(folder, files, "Save to a path on a file system that all ranks share.")
    described = {name: asdict(files[name]) for name in sorted(files)}
    manifest = {"format": FORMAT, "version": VERSION, **about, "files": described}
    if isinstance(path, RemotePath):
        inside = {f"{folder.name}/{name}": known for name, known in described.items()}
        manifest |= {"data": folder.name, "files": inside}
        remote.publish(path, _json(manifest | {_OWN_HASH: _own_hash(manifest)}))
        return
    assert isinstance(folder, Path)
    _write(folder / MANIFEST, _json(manifest | {_OWN_HASH: _own_hash(manifest)}))
    flush(folder)
    if not os.path.lexists(path):
        folder.rename(path)
    elif not _exchange(folder, path):
        path.rename(aside(path, REPLACED))
        folder.rename(path)
    flush(path.parent)
    _clear(folder)
    _clear(aside(path, REPLACED))


def abandon(path: Place) -> None:
    """Remove the files of an unfinished save."""
    if isinstance(path, RemotePath):
        remote.remove_remains([path])
    else:
        _delete(aside(path, SAVING))


def remove(path: Place) -> None:
    """Remove a checkpoint. If that is interrupted, what is left does not count as a checkpoint."""
    if isinstance(path, RemotePath):
        remote.remove(path)
    elif path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        hidden = aside(path, REMOVED)
        _delete(hidden)
        path.rename(hidden)
        _clear(hidden)


def require_writable(path: Place) -> None:
    """Refuse a folder that is not writable or cannot be created. An object store is not checked
    before the first save.

    Raises:
        StorageError: it, or the parent in which it would be created, is read-only or not a folder.
    """
    if isinstance(path, RemotePath):
        return
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(
            f"Cannot write checkpoints to {path}: {there} is"
            f" {'read-only' if there.is_dir() else 'not a folder'}."
        )


def another_is_as_new(path: Place) -> bool:
    """Return whether the folder has another complete checkpoint, with all its files, of the same or
    a later step."""
    step = -1
    with suppress(CheckpointError):
        step = _step_of(path)
    for manifest in manifests_in(path.parent):
        with suppress(CheckpointError):
            if _resolved(manifest.parent) != _resolved(path) and _step_of(manifest.parent) >= step:
                return True
    return False


def _step_of(path: Place) -> int:
    """Read the step of a checkpoint. Raises CheckpointError if it is not complete."""
    return int(read_manifest(path).get("global_step", 0))


def _resolved(path: Place) -> Place:
    return path if isinstance(path, RemotePath) else path.resolve()


# Reading


def contents(path: Place, manifest: Mapping[str, Any]) -> Place:
    """The folder with the tensors of a checkpoint."""
    return path / manifest["data"] if manifest.get("data") else path


def read_manifest(path: Place) -> dict[str, Any]:
    """Read the manifest of a complete checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it was never finished, or files are missing or have
            changed size.
    """
    try:
        recover(path)
        _require_folder(path)
        manifest = _read_json(path / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {reason(error)}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path / MANIFEST} is not the manifest of a lightning_3d checkpoint. Choose a folder"
            " that Lightning3DStrategy saved."
        )
    if manifest.pop(_OWN_HASH, None) != _own_hash(manifest):
        raise CheckpointError(
            f"{path / MANIFEST} has changed since it was saved: the checkpoint is damaged. Use"
            " another one."
        )
    check_manifest(path, manifest)
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest['version']}, but this release reads only versions"
            f" up to {VERSION}. Upgrade lightning_3d."
        )
    _require_sizes(path, files_of(manifest), "The checkpoint is damaged. Use another one.")
    return manifest


def files_of(manifest: Mapping[str, Any]) -> Files:
    """Size and hash of each file, from a manifest."""
    return {name: FileSum(**known) for name, known in manifest["files"].items()}


def require_undamaged(path: Place, problems: list[str]) -> None:
    """Refuse a checkpoint in which `find_damage` found problems."""
    if problems:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: {listed(sorted(problems))}. Use another one."
        )


def verify(path: Place, manifest: Mapping[str, Any]) -> None:
    """Compare every file of a checkpoint with the manifest, in this process alone.

    Raises:
        CheckpointError: names the files that differ.
    """
    require_undamaged(path, find_damage(path, files_of(manifest), files_of(manifest)))


def read_trainer_state(path: Place, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Read Lightning's state from a complete checkpoint.

    Raises:
        CheckpointError: a file cannot be read, or has something else in it.
    """
    inside = contents(path, manifest)
    tensors = {}
    if (inside / TRAINER_TENSORS).exists():
        file = inside / TRAINER_TENSORS
        try:
            tensors = (
                from_safetensors(file.read_bytes())
                if isinstance(file, RemotePath)
                else load_file(file)
            )
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from error
    packed = _read_json(inside / TRAINER)
    try:
        state = unpack(packed, tensors)
        if not isinstance(state, dict):
            raise TypeError(f"it has a {type(state).__name__}")
    except Exception as error:  # a file that somebody made or changed can raise anything
        raise CheckpointError(
            f"{inside / TRAINER} is damaged: {reason(error)}. Use another checkpoint."
        ) from error
    return state


def _require_folder(path: Place) -> None:
    if isinstance(path, RemotePath):
        if not (path / MANIFEST).is_file():
            there = (
                f" The folder has no {MANIFEST}: its save was never finished, or it is not a"
                " checkpoint."
                if path.exists()
                else ""
            )
            hint = (
                ""
                if there
                else did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])
            )
            raise CheckpointError(f"There is no checkpoint at {path}.{there}{hint}")
        return
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} points to {os.readlink(path)}, which does not exist. Name an existing"
            " checkpoint."
        )
    if not path.exists():
        hint = did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        raise CheckpointError(f"There is no checkpoint at {path}.{hint}")
    if not (path / MANIFEST).is_file():
        kind = (
            "a checkpoint that was never finished, or some other folder"
            if path.is_dir()
            else "a file"
        )
        inside = checkpoints_in(path) or checkpoints_in(path / "checkpoints")
        hint = f" Did you mean {inside[0]}?" if inside else how_to_convert(path)
        raise CheckpointError(
            f"{path} is {kind}. A checkpoint of this strategy is a folder with {MANIFEST}.{hint}"
        )


def _require_sizes(folder: Place, files: Files, advice: str) -> None:
    wanted = {name: known.bytes for name, known in files.items()}
    wrong = (
        remote.missing(folder, wanted)
        if isinstance(folder, RemotePath)
        else _missing(folder, wanted)
    )
    for name, found in wrong.items():
        state = "is missing" if found is None else f"has {found} bytes instead of {wanted[name]}"
        raise CheckpointError(f"The file {name} {state} in {folder}. {advice}")


def _missing(folder: Path, wanted: Mapping[str, int]) -> dict[str, int | None]:
    found = {
        name: (folder / name).stat().st_size if (folder / name).is_file() else None
        for name in wanted
    }
    return {name: size for name, size in found.items() if size != wanted[name]}


def _exchange(first: Path, second: Path) -> bool:
    """Swap the names of two folders in one step; False if the file system cannot (`renameat2`,
    Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return (
        rename is not None
        and rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0
    )


def _own_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _clear(path: Path) -> None:
    """Remove what is no longer needed. If that fails now (NFS keeps files that are being read), a
    later save does it."""
    try:
        _delete(path)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _write(path: Place, contents: bytes) -> FileSum:
    file = HashedFile(path)
    file.write(contents)
    return file.close()


def _read_json(path: Place) -> Any:
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
