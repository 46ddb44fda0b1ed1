"""A checkpoint on disk: one folder that is complete or not there.

    epoch=0-step=10.ckpt/
        manifest.json                        what wrote it, and the size of every other file
        trainer.json, trainer.safetensors    Lightning's state, and the tensors in it
        .metadata, __0_0.distcp, ...         weights and optimizer state, by torch.distributed.checkpoint

A save fills `.epoch=0-step=10.ckpt.saving`; the manifest comes last, and one rename makes the folder a checkpoint.
Names with a leading dot are never checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors.torch import load_file, save_file

from lightning_3d.checkpoint.plain import Packer, unpack
from lightning_3d.checkpoint.tensors import TensorFolder, reason
from lightning_3d.errors import CheckpointError, did_you_mean

MANIFEST = "manifest.json"
TRAINER, TRAINER_TENSORS = "trainer.json", "trainer.safetensors"
FORMAT, VERSION = "lightning_3d", 1

T = TypeVar("T")


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 and give its result, or its error, to all ranks. Collective: one broadcast of an object.

    Raises:
        CheckpointError: the action failed, on every rank.
    """
    outcome: list[Any] = [None, None]
    failed: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # of any kind: the other ranks wait to hear of it
            outcome[1], failed = reason(error), error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1]) from failed
    return outcome[0]


def local_path(path: str | os.PathLike[str]) -> Path:
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is not on a local or mounted file system; checkpoints can only be there. Give a folder's path."
        )
    return Path(path).absolute()


def begin(path: Path, trainer_state: Mapping[str, Any]) -> Path:
    """Make the temporary folder for a checkpoint at `path`, with Lightning's state in it. One rank calls it."""
    folder = _aside(path, "saving")
    _delete(folder)  # of a save that was interrupted
    folder.mkdir(parents=True)
    packer = Packer()
    packed = packer.pack_entries(trainer_state)
    if packer.left_out:
        warnings.warn(
            f"Not plain data, so not in the checkpoint {path.name}: {'; '.join(packer.left_out)}.", stacklevel=2
        )
    _write_json(folder / TRAINER, packed)
    if packer.tensors:
        save_file(packer.tensors, folder / TRAINER_TENSORS)
        _flush(folder / TRAINER_TENSORS)
    return folder


def commit(folder: Path, path: Path, about: Mapping[str, Any]) -> None:
    """Check that all files are there, write the manifest and give the folder its name.

    One rank calls it, after all have written. What was at `path` before is kept until the new one is in its place.
    """
    tensors = TensorFolder(folder)
    _require_sizes(folder, tensors.files, "Do all ranks see the same file system?")
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "version": VERSION, **about, "tensor_bytes": tensors.nbytes, "files": files}
    _write_json(folder / MANIFEST, manifest)
    _flush(folder)
    replaced = _aside(path, "replaced")
    if os.path.lexists(path):
        _delete(replaced)
        path.rename(replaced)
    folder.rename(path)
    _flush(path.parent)
    _delete(replaced)


def abandon(path: Path) -> None:
    """Remove what an unfinished save has written. One rank calls it."""
    _delete(_aside(path, "saving"))


def remove(path: Path) -> None:
    """Remove a checkpoint; one that is half removed is not taken for a checkpoint any more. One rank calls it."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        hidden = _aside(path, "removed")
        _delete(hidden)
        path.rename(hidden)
        _delete(hidden)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a complete checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it was never finished, or files are missing or shorter than they were.
    """
    if not path.exists():
        before = _aside(path, "replaced")
        hint = did_you_mean(path.name, os.listdir(path.parent) if path.parent.is_dir() else [])
        if before.exists():
            hint = (
                f" A save was killed when it replaced the one before, which is still there: rename {before} to {path}."
            )
        raise CheckpointError(f"There is no checkpoint at {path}.{hint}")
    if not (path / MANIFEST).is_file():
        kind = "a folder that was never finished, or something else" if path.is_dir() else "a file"
        raise CheckpointError(f"{path} is {kind}. A checkpoint of this strategy is a folder with {MANIFEST}.")
    manifest = _read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST} does not describe a checkpoint of this strategy.")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest['version']}; this release reads up to {VERSION}. Upgrade it."
        )
    _require_sizes(path, manifest["files"], "The checkpoint is damaged; use another one.")
    return manifest


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Lightning's state from a complete checkpoint."""
    tensors = load_file(path / TRAINER_TENSORS) if (path / TRAINER_TENSORS).exists() else {}
    return unpack(_read_json(path / TRAINER), tensors)


def _require_sizes(folder: Path, sizes: Mapping[str, int], advice: str) -> None:
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None or found < size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"The file {name} {state} in {folder}. {advice}")


def _aside(path: Path, purpose: str) -> Path:
    return path.with_name(f".{path.name}.{purpose}")


def _delete(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False))
    _flush(path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk: a rename must not overtake what it commits."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
