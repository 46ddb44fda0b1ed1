"""Checkpoints that belong to the model, not to the layout: any layout saves them, any other loads them.

`folder` is what lies on disk and when it counts, `tensors` and `slices` how every rank writes and reads only its part,
`state` what of a model in training goes in, `plain` how Lightning's own state becomes JSON. The strategy calls the
functions of this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.checkpoint import folder
from lightning_3d.checkpoint.folder import local_path, on_rank_zero, read_manifest
from lightning_3d.checkpoint.pipeline_state import share_pipeline_state, take_pipeline_state
from lightning_3d.checkpoint.slices import Slices
from lightning_3d.checkpoint.state import (
    CURRENT,
    CURRENT_STATE,
    MODEL,
    LocalState,
    OptimizerOwner,
    describe_optimizer,
    restore_hyper_parameters,
)
from lightning_3d.checkpoint.tensors import Notes, TensorFolder, write_tensors
from lightning_3d.errors import CheckpointError

__all__ = [
    "LocalState",
    "describe_optimizer",
    "load_checkpoint",
    "load_full_state_dict",
    "load_optimizer",
    "load_weights",
    "local_states",
    "read_manifest",
    "remove_checkpoint",
    "save_checkpoint",
    "share_pipeline_state",
    "take_pipeline_state",
]

PATH = "lightning_3d_path"
"""Where in Lightning's checkpoint dict the folder stands from which its tensors are to be read."""

_NOT_TRAINER_STATE = ("state_dict", CURRENT_STATE, "hparams_type")
"""Tensors are written by the ranks that hold them; the other entry is the class of omegaconf containers: dicts here."""


def save_checkpoint(
    path: str | os.PathLike[str],
    checkpoint: Mapping[str, Any],
    local: LocalState,
    owner: OptimizerOwner | None,
    about: Mapping[str, Any],
) -> None:
    """Write a checkpoint folder that appears under its name when it is complete. Collective over the world.

    Args:
        path: the folder's final name, the same on all ranks. What is there is replaced.
        checkpoint: Lightning's dict, with the rank's own tensors in "state_dict". Optimizer state is saved if it has
            "optimizer_states".
        owner: of the optimizer's state; None if there is none.
        about: goes into the manifest.

    Raises:
        CheckpointError: on every rank; nothing is left behind, and what was at `path` before is still there.
    """
    final = local_path(path)
    trainer_state = {key: value for key, value in checkpoint.items() if key not in _NOT_TRAINER_STATE}
    with_optimizer = owner is not None and bool(checkpoint.get("optimizer_states"))

    def collect() -> tuple[dict[str, Slices], Notes]:
        shards = owner.optimizer_shards(to_save=True) if owner is not None and with_optimizer else []
        state, numbers = local.optimizer(shards, offered=True)
        held = local.weights(checkpoint["state_dict"], offered=True) | state
        held |= local.weights(checkpoint.get(CURRENT_STATE, {}), offered=True, prefix=CURRENT)
        return held, {"aliases": local.aliases, "numbers": dict.fromkeys(numbers, "")}

    facts = {key: checkpoint[key] for key in ("epoch", "global_step") if key in checkpoint}
    facts = {**about, **facts, "optimizer_state": with_optimizer}
    try:
        temporary = on_rank_zero(lambda: folder.begin(final, trainer_state))
        write_tensors(temporary, collect)
        on_rank_zero(lambda: folder.commit(temporary, final, facts))
    except CheckpointError:
        on_rank_zero(lambda: folder.abandon(final))
        raise


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Lightning's dict, without tensors: `load_weights` and `load_optimizer` read those. Collective over the world.

    Raises:
        CheckpointError: on every rank, if there is no complete checkpoint.
    """
    found = local_path(path)
    on_rank_zero(lambda: read_manifest(found))
    return {**folder.read_trainer_state(found), PATH: str(found)}


def load_weights(checkpoint: Mapping[str, Any], local: LocalState, *, strict: bool = True) -> None:
    """Fill the module's parameters and buffers. See `LocalState.load_weights`."""
    local.load_weights(TensorFolder(local_path(checkpoint[PATH])), strict=strict)


def local_states(checkpoint: Mapping[str, Any], local: LocalState) -> dict[str, dict[str, Any]]:
    """This rank's part of "state_dict" and "current_model_state", for callbacks that read them. After `load_weights`."""
    return local.states(TensorFolder(local_path(checkpoint[PATH])))


def load_optimizer(
    checkpoint: Mapping[str, Any], local: LocalState, optimizer: Optimizer, owner: OptimizerOwner
) -> None:
    """Fill the optimizer's state and hyper parameters.

    Raises:
        CheckpointError: the checkpoint has none, or of another optimizer.
    """
    found = local_path(checkpoint[PATH])
    described = checkpoint.get("optimizer_states")
    if not described:
        raise CheckpointError(f"{found} holds weights but no optimizer state, so training cannot resume from it.")
    restore_hyper_parameters(optimizer, described[0])
    local.load_optimizer(TensorFolder(found), owner)


def remove_checkpoint(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint. One rank calls it."""
    folder.remove(local_path(path))


def load_full_state_dict(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """All parameters and buffers of a checkpoint, whole, on the CPU, by their names in the user's module.

    Tied parameters share memory. For one process, without process groups:
    `module.load_state_dict(load_full_state_dict(path))`.

    Raises:
        CheckpointError: there is no complete checkpoint.
    """
    found = local_path(path)
    read_manifest(found)
    tensors = TensorFolder(found)
    state = {name: tensors.read(MODEL + name) for name in tensors.names(MODEL)}
    return state | {alias: state[name] for alias, name in tensors.notes.get("aliases", {}).items() if name in state}
