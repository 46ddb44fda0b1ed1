"""The weights of a model in training, one whole tensor at a time, under the names and in the shapes
of Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.huggingface import StoredForm, meta_model
from lightning_3d.checkpoint.resharding import Slices
from lightning_3d.checkpoint.state import MODEL, LocalState
from lightning_3d.compat.transformers import describe_models
from lightning_3d.errors import CheckpointError

Piece = tuple[tuple[int, ...], tuple[int, ...], int]
"""Offset of a slice in the whole tensor, its shape, and the rank that sends it."""


class GatheredTensors:
    """The tensors of all ranks, read like those of a checkpoint. Every rank reads the same ones in
    the same order.

    Args:
        local: this rank's part.
        module: its module.
        device: device on which whole tensors are made.

    Communicates when it is made: a list of the slices of every rank. `read` broadcasts each slice
    once.
    """

    def __init__(self, local: LocalState, module: nn.Module, device: torch.device) -> None:
        self._held: Mapping[str, Slices] = local.weights(module.state_dict(), offered=True)
        self._device = device
        own = {name: _described(slices) for name, slices in self._held.items() if slices.parts}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._types: dict[str, torch.dtype] = {}
        self._pieces: dict[str, dict[tuple[int, ...], Piece]] = {}
        for rank, offers in enumerate(everyone):
            for name, (shape, kind, replica, parts) in offers.items():
                self._shapes[name], self._types[name] = shape, kind
                pieces = self._pieces.setdefault(name, {})
                for offset, size in () if replica else parts:
                    pieces.setdefault(offset, (offset, size, rank))

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor whose name has this prefix, by its name without it."""
        return {
            name.removeprefix(prefix): shape
            for name, shape in self._shapes.items()
            if name.startswith(prefix)
        }

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor."""
        return self._types[name]

    def read(self, name: str) -> Tensor:
        """Return a whole tensor. Collective over the world."""
        whole = torch.empty(self._shapes[name], dtype=self._types[name], device=self._device)
        for offset, size, rank in self._pieces[name].values():
            piece = torch.empty(size, dtype=whole.dtype, device=self._device)
            if rank == dist.get_rank():
                piece.copy_(self._held[name].parts[offset])
            dist.broadcast(piece, rank)
            place = tuple(
                slice(start, start + length) for start, length in zip(offset, size, strict=True)
            )
            whole[place] = piece
        return whole


def _described(
    slices: Slices,
) -> tuple[tuple[int, ...], torch.dtype, bool, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    kind = next(iter(slices.parts.values())).dtype
    return (
        slices.shape,
        kind,
        slices.replica,
        [(offset, tuple(part.shape)) for offset, part in slices.parts.items()],
    )


def whole_weights(
    tensors: GatheredTensors, root: nn.Module, name: str
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of the model `name` of `root` as `save_pretrained` writes them.
    Collective over the world.

    A model that is not of Transformers, or has adapters, has the names of its own parameters and
    buffers.
    """
    prefix = f"{MODEL}{name}."
    everyone: list[Any] = [None] * dist.get_world_size()
    # a stage may lack a part by which others know the model
    dist.all_gather_object(everyone, describe_models(root))
    described = everyone[0].get(name)
    if described is None or described["adapted"]:
        for key in tensors.names(prefix):
            yield key, tensors.read(prefix + key)
        return
    model = meta_model(described)
    try:
        stored = StoredForm(tensors, prefix, model, None, "the engine")
    except CheckpointError as error:
        raise CheckpointError(
            f"{error} Engine.save and load_full_state_dict give every tensor as the model has it."
        ) from None
    yield from stored
