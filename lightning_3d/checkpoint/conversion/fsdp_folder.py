"""A sharded checkpoint of Lightning's FSDPStrategy: a folder of torch.distributed.checkpoint with
`meta.pt`, Lightning's dict, in it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from lightning_3d.checkpoint.conversion.lightning_file import drop_copies
from lightning_3d.checkpoint.conversion.safe_unpickler import load
from lightning_3d.checkpoint.conversion.source_contents import (
    NOT_CARRIED,
    Foreign,
    Later,
    step_count,
)
from lightning_3d.checkpoint.reading import TensorFolder
from lightning_3d.errors import CheckpointError

META = "meta.pt"
_MODEL, _OPTIMIZER = "model.", "optimizer_0."
_STATE, _GROUPS = f"{_OPTIMIZER}state.", f"{_OPTIMIZER}param_groups."


def read_folder(path: Path, *, optimizer: bool = True, plain_only: bool = False) -> Foreign:
    """Read the contents of a folder; every tensor is read separately, on demand.

    Raises:
        CheckpointError: the folder has the state of more than one optimizer, or is damaged.
    """
    tensors = TensorFolder(path)
    named = tensors.names("")
    if optimizer and any(name.startswith("optimizer_1.") for name in named):
        raise CheckpointError(
            f"{path} has the state of several optimizers, but only one can be converted. Use"
            " --weights-only."
        )

    def later(name: str) -> Later:
        return Later(named[name], tensors.dtype(name), lambda: tensors.read(name))

    found = Foreign(
        "a sharded checkpoint of Lightning's FSDPStrategy",
        {name.removeprefix(_MODEL): later(name) for name in named if name.startswith(_MODEL)},
        trainer={
            key: value
            for key, value in load(path / META, plain_only=plain_only).items()
            if key not in NOT_CARRIED
        },
    )
    if not optimizer:
        return found
    for name in named:
        if name.startswith(_STATE):
            parameter, _, key = name.removeprefix(_STATE).rpartition(".")
            found.states.setdefault(parameter, {})[key] = (
                step_count(tensors.read(name)) if key == "step" else later(name)
            )
    found.groups = _groups(tensors, path)
    drop_copies(found)
    return found


def _groups(tensors: TensorFolder, path: Path) -> list[dict[str, Any]]:
    """Read the hyperparameters of all parameter groups. Each has its own entry, such as
    `optimizer_0.param_groups.1.lr`."""
    groups: dict[int, dict[str, Any]] = {}
    saved = {name: tensors.read(_GROUPS + name) for name in tensors.names(_GROUPS)}
    saved |= {
        name: load(io.BytesIO(blob), source=f"{_GROUPS}{name} in {path}")
        for name, blob in tensors.blobs(_GROUPS).items()
    }
    for name, value in saved.items():
        number, _, key = name.partition(".")
        groups.setdefault(int(number), {})["names" if key == "params" else key] = value
    return [groups[number] for number in sorted(groups)]
