"""What a run of a verification records of each batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.sharding import ShardSpec


@dataclass(frozen=True)
class Piece:
    """Values that a process has of one parameter.

    Attributes:
        start: first element in the flattening of the local parameter; None where the values have
            its shape.
        values: by key.
    """

    start: int | None
    values: dict[str, Tensor | float]


@dataclass
class State:
    """The state before a batch.

    Attributes:
        weights, optimizer: by name of the parameter.
        buffers: by name.
        logged: values that callbacks can read.
    """

    weights: dict[str, Piece]
    optimizer: dict[str, Piece]
    buffers: dict[str, Tensor]
    logged: dict[str, float]


@dataclass
class Records:
    """The records of one process.

    Attributes:
        batches: what it read, if it reads for its data-parallel index.
        samples: indices of the samples of each of these batches; None where they are not known.
        losses, norms: of each batch.
        states: one more than batches: before each, and at the end.
        specs: place of its parameters in the whole model; empty on one process.
        data_index: its data-parallel index.
    """

    batches: list[Any] = field(default_factory=list)
    samples: list[list[Any] | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    data_index: int = 0

    def save(self, folder: Path, rank: int) -> None:
        """Write the records of a rank, as one file that appears when it is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"rank_{rank}.part"
        torch.save(self, part)
        part.rename(folder / f"rank_{rank}.pt")

    @classmethod
    def load(cls, folder: Path) -> list[Records]:
        """Read the records of all ranks of a run, in their order."""
        paths = sorted(
            folder.glob("rank_*.pt"), key=lambda path: int(path.stem.removeprefix("rank_"))
        )
        return [torch.load(path, weights_only=False) for path in paths]


def on_host(value: Any) -> Any:
    """Copy the tensors of a nested container to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        items = {key: on_host(item) for key, item in value.items()}
        return items if type(value) is dict else _same_kind(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_host(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(item) for item in value)
    return value


def _same_kind(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    return type(value)(items)  # type: ignore[call-arg]


def rows_in(batch: Any) -> int | None:
    """Rows that all tensors of a batch have in dimension 0; None where they have no common
    number."""
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in tensors_of(batch)}
    return sizes.pop() if len(sizes) == 1 else None


def merged(batches: list[Any], places: list[list[int]]) -> Any:
    """Join the batches of data-parallel ranks: row j of rank r becomes row `places[r][j]`.

    Of values other than tensors with rows, those of the first rank are taken; lists with one entry
    per row are joined too.
    """
    first = batches[0]
    counts = [len(place) for place in places]
    if isinstance(first, Tensor):
        if [len(batch) if batch.ndim else None for batch in batches] != counts:
            return first
        whole = first.new_empty((sum(counts), *first.shape[1:]))
        for batch, place in zip(batches, places, strict=True):
            whole[place] = batch
        return whole
    if isinstance(first, Mapping):
        items = {key: merged([batch[key] for batch in batches], places) for key in first}
        return items if type(first) is dict else _same_kind(first, items)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(merged(list(items), places) for items in zip(*batches, strict=True)))
    if isinstance(first, (list, tuple)):
        if [len(batch) for batch in batches] == counts and not any(True for _ in tensors_of(first)):
            entries = [None] * sum(counts)
            for batch, place in zip(batches, places, strict=True):
                for row, entry in zip(place, batch, strict=True):
                    entries[row] = entry
            return type(first)(entries)
        return type(first)(merged(list(items), places) for items in zip(*batches, strict=True))
    return first


def same_values(one: Any, other: Any) -> bool:
    """Return whether two batches have equal tensors."""
    ours, theirs = list(tensors_of(one)), list(tensors_of(other))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
        for a, b in zip(ours, theirs, strict=True)
    )
