"""A checkpoint on disk: one folder that is complete or not there.

    epoch=0-step=10.ckpt/
        manifest.json                        what wrote it, and size and SHA-256 of every other file
        trainer.json, trainer.safetensors    Lightning's state, and the tensors in it
        .metadata, __0_0.distcp, ...         weights and optimizer state, by torch.distributed.checkpoint

A save fills a folder beside it (`checkpoint_names`); the manifest comes last, and one rename makes the folder a checkpoint. Whatever
a killed save left is cleared away by the next one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors

from lightning_3d.checkpoint.agreement import StorageError, reason
from lightning_3d.checkpoint.hashes import FileSum, HashedFile, find_damage, flush
from lightning_3d.checkpoint.plain import Packer, unpack
from lightning_3d.checkpoint_names import MANIFEST, REMOVED, REPLACED, SAVING, aside, recover, recover_all
from lightning_3d.errors import CheckpointError, did_you_mean, listed

TRAINER, TRAINER_TENSORS = "trainer.json", "trainer.safetensors"
FORMAT, VERSION = "lightning_3d", 1
_OWN_HASH = "sha256"

Files = dict[str, FileSum]


def local_path(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is not on a local or mounted file system; checkpoints can only be there. Give a folder's path."
        )
    return Path(path).absolute()


# Writing. One rank calls these functions.


def begin(path: Path, trainer_state: Mapping[str, Any], *, alone: bool = True) -> tuple[Path, Files]:
    """Make the temporary folder for a checkpoint at `path`, with Lightning's state in it.

    Args:
        alone: nobody else writes into the folder of `path`, so that what killed saves left there is cleared away.

    Returns:
        The folder, and the hashes of its files.
    """
    if alone and path.parent.is_dir():
        recover_all(path.parent)
        for purpose in (SAVING, REPLACED, REMOVED):
            for left in path.parent.glob(f".*.{purpose}"):
                _delete(left)
    folder = aside(path, SAVING)
    _delete(folder)
    folder.mkdir(parents=True)
    packer = Packer()
    packed = packer.pack_entries(trainer_state)
    if packer.left_out:
        warnings.warn(
            f"Not plain data, so not in the checkpoint {path.name}: {'; '.join(packer.left_out)}.", stacklevel=2
        )
    files = {TRAINER: _write(folder / TRAINER, _json(packed))}
    if packer.tensors:
        files[TRAINER_TENSORS] = _write(folder / TRAINER_TENSORS, to_safetensors(packer.tensors))
    return folder, files


def commit(folder: Path, path: Path, about: Mapping[str, Any], files: Files) -> None:
    """Check that all files are there, write the manifest and give the folder its name.

    What was at `path` before is kept until the new one is in its place.
    """
    _require_sizes(folder, files, "Do all ranks see the same file system?")
    described = {name: asdict(files[name]) for name in sorted(files)}
    manifest = {"format": FORMAT, "version": VERSION, **about, "files": described}
    _write(folder / MANIFEST, _json(manifest | {_OWN_HASH: _own_hash(manifest)}))
    flush(folder)
    if not os.path.lexists(path):
        folder.rename(path)
    elif not _exchange(folder, path):
        path.rename(aside(path, REPLACED))
        folder.rename(path)
    flush(path.parent)
    _delete(folder)
    _delete(aside(path, REPLACED))


def abandon(path: Path) -> None:
    """Remove what an unfinished save has written."""
    _delete(aside(path, SAVING))


def remove(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is not taken for a checkpoint any more."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        hidden = aside(path, REMOVED)
        _delete(hidden)
        path.rename(hidden)
        _delete(hidden)


def require_writable(path: Path) -> None:
    """Refuse a folder in which nothing can be written, or that cannot be made.

    Raises:
        StorageError: it, or the folder in which it would be made, is read-only or no folder.
    """
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise StorageError(f"No checkpoint can be written to {path}: {there} is {'read-only' if there.is_dir() else 'no folder'}.")


def others_are_whole(path: Path) -> bool:
    """Whether another complete checkpoint, with all its files, lies beside this one."""
    for manifest in path.parent.glob(f"[!.]*/{MANIFEST}"):
        if manifest.parent.resolve() != path.resolve():
            try:
                read_manifest(manifest.parent)
                return True
            except CheckpointError:
                continue
    return False


# Reading


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it was never finished, or files are missing or of another size than they were.
    """
    try:
        recover(path)
        _require_folder(path)
        manifest = _read_json(path / MANIFEST)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read: {reason(error)}.") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} does not describe a checkpoint of this strategy.")
    if manifest.pop(_OWN_HASH, None) != _own_hash(manifest):
        raise CheckpointError(f"{path / MANIFEST} is not what was written: the checkpoint is damaged; use another one.")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest['version']}; this release reads up to {VERSION}. Upgrade it."
        )
    _require_sizes(path, files_of(manifest), "The checkpoint is damaged; use another one.")
    return manifest


def files_of(manifest: Mapping[str, Any]) -> Files:
    """Size and hash of each file, as a manifest says."""
    return {name: FileSum(**known) for name, known in manifest["files"].items()}


def require_undamaged(path: Path, problems: list[str]) -> None:
    """Refuse a checkpoint for what `find_damage` found in it."""
    if problems:
        raise CheckpointError(f"The checkpoint {path} is damaged: {listed(sorted(problems))}. Use another one.")


def verify(path: Path, manifest: Mapping[str, Any]) -> None:
    """Compare every file of a checkpoint with the manifest, in this process alone.

    Raises:
        CheckpointError: it names the files that differ.
    """
    require_undamaged(path, find_damage(path, files_of(manifest), files_of(manifest)))


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Lightning's state from a complete checkpoint."""
    tensors = load_file(path / TRAINER_TENSORS) if (path / TRAINER_TENSORS).exists() else {}
    return unpack(_read_json(path / TRAINER), tensors)


def _require_folder(path: Path) -> None:
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path} points to {os.readlink(path)}, which is not there. Name a checkpoint that is.")
    if not path.exists():
        hint = did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        raise CheckpointError(f"There is no checkpoint at {path}.{hint}")
    if not (path / MANIFEST).is_file():
        kind = "a folder that was never finished, or something else" if path.is_dir() else "a file"
        raise CheckpointError(f"{path} is {kind}. A checkpoint of this strategy is a folder with {MANIFEST}.")


def _require_sizes(folder: Path, files: Files, advice: str) -> None:
    for name, known in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != known.bytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {known.bytes}"
            raise CheckpointError(f"The file {name} {state} in {folder}. {advice}")


def _exchange(first: Path, second: Path) -> bool:
    """Let two folders change their names in one step; False where the file system cannot (`renameat2`, Linux)."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def _own_hash(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _write(path: Path, contents: bytes) -> FileSum:
    file = HashedFile(path)
    file.write(contents)
    return file.close()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
