"""Checkpoints of a few tensors, written by one process without a model, and ways to damage them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_3d.checkpoint import CheckpointStore, SaveMode
from lightning_3d.checkpoint.resharding import whole
from lightning_3d.checkpoint.state import MODEL
from lightning_3d.errors import CheckpointError
from lightning_3d.options.checkpoints import CheckpointOptions


class PlainState:
    """In the place of `LocalState`: tensors that are whole on the one rank that there is."""

    aliases: dict[str, str] = {}

    def weights(self, state: dict[str, Tensor], **options: Any) -> dict[str, Any]:
        return {f"{MODEL}{name}": whole(tensor) for name, tensor in state.items()}


def tensors(step: int, numel: int = 1000) -> dict[str, Tensor]:
    return {"weight": torch.full((numel,), float(step)), "bias": torch.arange(5) + step}


def save(
    path: Path,
    step: int,
    store: CheckpointStore | None = None,
    mode: SaveMode = SaveMode.REQUIRED,
    numel: int = 1000,
) -> bool:
    checkpoint = {
        "global_step": step,
        "epoch": 0,
        "state_dict": tensors(step, numel),
        "note": torch.ones(3),
    }
    store = store or CheckpointStore(CheckpointOptions(checkpoint_asynchronous=False))
    return store.save(path, checkpoint, PlainState(), None, {"layout": "tp1"}, mode)  # type: ignore[arg-type]


def refusal(path: Path, store: CheckpointStore | None = None) -> str:
    with pytest.raises(CheckpointError) as refused:
        (store or CheckpointStore()).load(path)
    assert refused.value.exit_code == 2 and "\n" not in str(refused.value)
    return str(refused.value)


def flip_bit(path: Path, where: float = 0.5) -> None:
    contents = bytearray(path.read_bytes())
    contents[int(where * (len(contents) - 1))] ^= 1
    path.write_bytes(contents)


def background(folder: Path) -> CheckpointStore:
    store = CheckpointStore(CheckpointOptions(checkpoint_asynchronous=True))
    store.hold([folder])
    return store
