"""Recognize and convert a checkpoint, tensor by tensor from mapped files, so that only about one
tensor is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint import folder
from lightning_3d.checkpoint.conversion import deepspeed_folder, fsdp_folder, lightning_file
from lightning_3d.checkpoint.conversion.source_contents import Foreign, Later
from lightning_3d.checkpoint.resharding import Slices
from lightning_3d.checkpoint.state import MODEL, OPTIMIZER
from lightning_3d.checkpoint.writing import METADATA_FILE, TensorSave
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.ranks.progress import task
from lightning_3d.storage.checkpoint_names import MANIFEST
from lightning_3d.storage.remote_path import place

_VERSION = "pytorch-lightning_version"
SOURCE = "source"
"""Key in the manifest: the source of a converted checkpoint."""


@dataclass(frozen=True)
class Converted:
    """Summary of a conversion, and sentences about what was left out."""

    kind: str
    weights: int
    states: int
    step: int
    nbytes: int
    lost: tuple[str, ...]


def read_foreign(
    path: Path,
    groups: Sequence[Sequence[str]] | None = None,
    *,
    optimizer: bool = True,
    plain_only: bool = False,
) -> Foreign:
    """Read the contents of another program's checkpoint; tensors are read later. For the arguments
    see `convert`.

    Raises:
        CheckpointError: it is of no known kind, damaged, or would have to run code to be read.
    """
    if path.is_file():
        return lightning_file.read_file(path, groups, optimizer=optimizer, plain_only=plain_only)
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}. Check the path.")
    if (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} is already a lightning_3d checkpoint: every layout can load it."
        )
    if (path / METADATA_FILE).is_file() and (path / fsdp_folder.META).is_file():
        return fsdp_folder.read_folder(path, optimizer=optimizer, plain_only=plain_only)
    if deepspeed_folder.find_folder(path) is not None:
        return deepspeed_folder.read_folder(path, optimizer=optimizer, plain_only=plain_only)
    raise CheckpointError(
        f"{path} cannot be converted. It must be a checkpoint file of Lightning, a sharded folder"
        f" of its FSDPStrategy ({METADATA_FILE} and {fsdp_folder.META}), or a folder of DeepSpeed"
        " (*_model_states.pt)."
    )


def convert(
    source: Path,
    output: str,
    *,
    groups: Sequence[Sequence[str]] | None = None,
    optimizer: bool = True,
    rename: tuple[str, str] | None = None,
    plain_only: bool = False,
) -> Converted:
    """Convert the checkpoint of another program to a lightning_3d checkpoint, which appears when it
    is complete.

    Args:
        source: file or folder of the other program.
        output: path or URL of the new checkpoint.
        groups: see `read_file`.
        optimizer: whether to convert the optimizer's state too.
        rename: prefix of names, and the prefix to put in its place.
        plain_only: whether to leave out objects that need classes, instead of refusing the file.

    Raises:
        CheckpointError: as `read_foreign`. ConfigError: `output` is taken.
    """
    target = place(output)
    if target.exists():
        raise ConfigError(f"{target} already exists. Choose another --output.")
    try:
        with task(f"reading {source.name}"):
            found = read_foreign(source, groups, optimizer=optimizer, plain_only=plain_only)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise CheckpointError(
            f"{source} does not look like a Lightning or DeepSpeed checkpoint ({why})."
        ) from error
    if rename is not None:
        found = found.renamed(*rename)
    step = int(found.trainer.get("global_step", 0))
    about = {
        SOURCE: f"{found.kind}, {source.name}",
        "epoch": int(found.trainer.get("epoch", 0)),
        "global_step": step,
    }
    carried = found.groups is not None
    trainer = {_VERSION: version("lightning"), **found.trainer}
    if carried:
        trainer["optimizer_states"] = [{"class": None, "param_groups": found.groups}]
    else:  # Lightning would look for the optimizer of each
        trainer.pop("lr_schedulers", None)
    tensors = TensorSave()
    temporary, files = folder.begin(target, trainer, alone=False)
    try:
        tensors.plan(lambda: (_slices(found), {"aliases": found.aliases, "numbers": {}}))
        about_tensors: dict[str, Any] = {"optimizer_state": carried, "tensor_bytes": tensors.nbytes}
        tensors.finish(
            temporary,
            lambda sums: folder.commit(temporary, target, {**about, **about_tensors}, files | sums),
        )
    except BaseException:
        folder.abandon(target)
        raise
    states = sum(map(len, found.states.values()))
    return Converted(
        found.kind,
        len(found.weights),
        states,
        step,
        tensors.nbytes,
        tuple(found.lost + _lost(found)),
    )


def _slices(found: Foreign) -> dict[str, Slices]:
    held = {MODEL + name: _whole(value) for name, value in found.weights.items()}
    for name, states in found.states.items():
        held |= {f"{OPTIMIZER}{name}.{key}": _whole(value) for key, value in states.items()}
    return {name: slices for name, slices in held.items() if prod(slices.shape)}


def _whole(value: Later) -> Slices:
    return Slices(value.shape, {(0,) * len(value.shape): value})  # type: ignore[dict-item]  # it stands in for a tensor


def _lost(found: Foreign) -> list[str]:
    """List what is missing in a converted checkpoint, in sentences."""
    lost = [
        "The states of the random number generators are missing: dropout and random augmentations"
        " start as in a new run."
    ]
    if "loops" not in found.trainer:
        lost.append(
            "The position in the data and Lightning's step count are missing, so the fit starts at"
            " step 0 with the first batch."
        )
    if found.groups is None:
        lost.append(
            "There is no optimizer state: you can load the weights, but not resume training."
        )
    return lost
