"""Checkpoints that belong to the model, not to the layout: any layout saves them, any other loads
them.

`store` saves, loads and removes checkpoints of a run; the strategy calls it and the functions of
this module. Below it:
- `folder` (on disk) and `remote_folder` (in an object store): the files of a checkpoint, and when
  it is complete.
- `writing`, `reading`, `slices`, `torch_archive`: every rank writes and reads only its shards.
  `hashes` finds damage.
- `background_save`: saves that may take long or hang, from copies in `host_buffers`.
  `rank_agreement`: errors on all ranks.
- `state`, `parameter_groups`, `rng_state`, `json_state`: what a checkpoint contains.
- `huggingface` and `peft` export; `conversion` imports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.folder import contents, read_manifest, verify
from lightning_3d.checkpoint.parameter_groups import (
    Names,
    describe_optimizer,
    name_groups,
    replace_groups,
    restore_hyper_parameters,
    share_groups,
    take_groups,
)
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.checkpoint.state import AVERAGE, MODEL, LocalState, OptimizerOwner, averaged
from lightning_3d.checkpoint.store import BATCHES, ORDERS, PART, PATH, CheckpointStore, SaveMode
from lightning_3d.errors import CheckpointError
from lightning_3d.parallel.zero.average import WeightAverage
from lightning_3d.storage.remote_path import place

__all__ = [
    "BATCHES",
    "PART",
    "PATH",
    "CheckpointStore",
    "LocalState",
    "Names",
    "ORDERS",
    "SaveMode",
    "describe_optimizer",
    "load_average",
    "load_full_state_dict",
    "load_optimizer",
    "load_weights",
    "local_states",
    "name_groups",
    "read_manifest",
    "replace_groups",
    "saved_generators",
    "share_groups",
    "take_groups",
]


def load_weights(
    checkpoint: Mapping[str, Any], local: LocalState, *, strict: bool = True, average: bool = False
) -> None:
    """Fill the module's parameters and buffers, with `average` from the average of weights. See
    `LocalState.load_weights`.

    A module that has only a part of what is saved says so in its hook `on_load_checkpoint`:
    `checkpoint[PART] = "model."`.

    Raises:
        CheckpointError: what is saved does not fit the model, or has no average.
    """
    found = place(checkpoint[PATH])
    local.load_weights(
        averaged(found) if average else TensorFolder(found),
        strict=strict,
        part=checkpoint.get(PART, ""),
    )


def local_states(checkpoint: Mapping[str, Any], local: LocalState) -> dict[str, dict[str, Any]]:
    """Return this rank's shard of "state_dict" and "current_model_state", for callbacks that read
    them. Call after `load_weights`."""
    return local.states(TensorFolder(place(checkpoint[PATH])))


def load_optimizer(
    checkpoint: Mapping[str, Any], local: LocalState, optimizer: Optimizer, owner: OptimizerOwner
) -> None:
    """Load the optimizer's state and hyperparameters.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, or the state of another optimizer.
    """
    found = place(checkpoint[PATH])
    described = checkpoint.get("optimizer_states")
    if not described:
        raise CheckpointError(
            f"{found} has weights but no optimizer state, so training cannot resume from it. Resume"
            " another checkpoint, or use load_full_state_dict to read the weights."
        )
    restore_hyper_parameters(optimizer, described[0])
    local.load_optimizer(TensorFolder(found), owner)


def load_average(checkpoint: Mapping[str, Any], local: LocalState, average: WeightAverage) -> None:
    """Go on with the average of a checkpoint. One without leaves the average as it was at the start
    of a fit."""
    folder, shards = TensorFolder(place(checkpoint[PATH])), average.restart()
    if folder.names(AVERAGE):
        local.load_average(folder, shards, average.buffers.values)
        average.restore()


def saved_generators(checkpoint: Mapping[str, Any], local: LocalState) -> Tensor | None:
    """Read the states of this rank's random number generators, for
    `LocalState.restore_generators`."""
    return local.saved_generators(TensorFolder(place(checkpoint[PATH])))


def load_full_state_dict(
    path: str | os.PathLike[str], *, verify_hashes: bool = True, average: bool = False
) -> dict[str, Tensor]:
    """Load all parameters and buffers of a checkpoint, unsharded, to the CPU. Keys are their names
    in the user's module.

    Tied parameters share memory. Needs no process groups. In one process, use
    `module.load_state_dict(load_full_state_dict(path))`.

    Args:
        path: folder or URL of the checkpoint.
        verify_hashes: whether to compare all files with their hashes first.
        average: whether to load the average of the weights (`ExponentialAverage`) instead of the
            weights.

    Raises:
        CheckpointError: there is no complete checkpoint, it is damaged, or it has no average.
    """
    found = place(path)
    manifest = read_manifest(found)
    if verify_hashes:
        verify(found, manifest)
    inside = contents(found, manifest)
    tensors = averaged(inside) if average else TensorFolder(inside)
    state = {name: tensors.read(MODEL + name) for name in tensors.names(MODEL)}
    return state | {
        alias: state[name]
        for alias, name in tensors.notes.get("aliases", {}).items()
        if name in state
    }
