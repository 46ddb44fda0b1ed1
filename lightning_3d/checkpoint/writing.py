"""Write tensors by slices under the whole model's names, in the file format of
torch.distributed.checkpoint (DCP).

`torch.distributed.checkpoint.load` and `format_utils` of any torch can read the folder. Ranks
exchange only lists of the slices that they hold; each rank writes its own bytes to the disk.

DCP's own `save` is not used: it sends one object for each slice to rank 0 and back, which for a
thousand ranks takes much of a gigabyte there. It also can neither hash files nor finish in the
background. Here each rank sends only a name, a shape and a list of offsets for each tensor, and
receives the indices of the slices that it must write.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_3d.checkpoint import torch_archive as archive
from lightning_3d.checkpoint.hashes import FileSum, HashedFile
from lightning_3d.checkpoint.rank_agreement import through_rank_zero
from lightning_3d.checkpoint.resharding import Slices
from lightning_3d.compat.host_memory import host_memory
from lightning_3d.compat.torch_checkpoint import dcp_metadata, dcp_place
from lightning_3d.errors import CheckpointError, StorageError, listed, reason
from lightning_3d.ranks.progress import task
from lightning_3d.storage.remote_path import Place

METADATA_FILE = ".metadata"
Notes = dict[str, dict[str, str]]
"""Small facts about the tensors: a mapping for each topic. Those of all ranks are merged."""
Piece = tuple[str, tuple[int, ...]]
"""Name of a tensor, and offset of a slice in it."""


@dataclass(frozen=True)
class _Offer:
    """The slices of one tensor that a rank holds: offsets, shapes, and whether they are a replica
    (see `Slices`)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    replica: bool


@dataclass(frozen=True)
class Written:
    """The file that a rank has written: name, hash, and place of each slice."""

    file: str
    sum: FileSum
    places: dict[Piece, tuple[int, int]]


class TensorSave:
    """One save of the tensors of all ranks. `plan` and `finish` are collective, `stage` and `write`
    are local.

    Attributes:
        doing: current activity of this rank, for the message about a save that does not finish.
    """

    def __init__(self) -> None:
        self.doing = "waiting for other ranks"
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._own: dict[Piece, Tensor] = {}
        self._metadata: Metadata | None = None
        self._copied: list[torch.cuda.Event] = []
        self._failed: StorageError | None = None

    def plan(self, collect: Callable[[], tuple[Mapping[str, Slices], Notes]]) -> None:
        """Agree which rank writes which slice: of the ranks that hold it, the one with the least to
        write. Collective.

        Args:
            collect: gives this rank's slices, by name, and its notes. Slices of different ranks are
                either the same or do not overlap, but for those of replicas: they are written where
                another rank, which is none, has the same ones.

        Raises:
            CheckpointError: on all ranks: one failed to collect, or the slices of the ranks do not
                cover a tensor.
        """
        held: Mapping[str, Slices] = {}

        def offer() -> tuple[dict[str, _Offer], Notes]:
            nonlocal held
            held, notes = collect()
            return {name: _offer(slices) for name, slices in held.items() if slices.parts}, notes

        def assign(offers: list[tuple[dict[str, _Offer], Notes]]) -> list[list[Piece]]:
            notes: Notes = {}
            for _, noted in offers:
                for topic, facts in noted.items():
                    notes.setdefault(topic, {}).update(facts)
            self._metadata = _describe([offered for offered, _ in offers], notes)
            return _one_writer_each([offered for offered, _ in offers])

        pieces = through_rank_zero(offer, assign)
        self._own = {(name, offset): held[name].parts[offset] for name, offset in pieces}

    def stage(self, buffers: dict[Piece, Tensor]) -> None:
        """Copy this rank's slices to the host, so that training may change them before they are
        written.

        A GPU makes the copies in its stream, before anything that training puts into the stream
        afterwards. The host does not wait for the copies here, but in `write`.

        Args:
            buffers: host buffers of the previous save. They are reused if this save has the same
                slices, otherwise replaced.
        """
        try:
            if {piece: _kind(part) for piece, part in self._own.items()} != {
                piece: _kind(buffer) for piece, buffer in buffers.items()
            }:
                buffers.clear()
                buffers.update(allocate_like(self._own))
        except (OSError, MemoryError, RuntimeError) as error:
            # only on this rank: `write` raises it on all
            self._failed = StorageError(
                "There is not enough host memory to copy the tensors of the checkpoint:"
                f" {reason(error)}"
            )
            return
        devices = {part.device for part in self._own.values() if part.is_cuda}
        self._own = {
            piece: buffers[piece].copy_(part.detach(), non_blocking=part.is_cuda)
            for piece, part in self._own.items()
        }
        self._copied = [torch.cuda.current_stream(device).record_event() for device in devices]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the checkpoint, each counted once. Only known on rank 0."""
        contents = self._metadata.state_dict_metadata.values() if self._metadata is not None else ()
        return sum(
            prod(e.size) * e.properties.dtype.itemsize
            for e in contents
            if isinstance(e, TensorStorageMetadata)
        )

    def write(self, folder: Place) -> Written | None:
        """Write this rank's slices into one file; None if it has none.

        Raises:
            StorageError: the storage fails, or there was not enough memory for copies.
        """
        if self._failed is not None:
            raise self._failed
        if not self._own:
            return None
        for copied in self._copied:
            copied.synchronize()
        name = f"__{self._rank}_0.distcp"
        self.doing = f"writing {folder / name}"
        file = HashedFile(folder / name)
        places = {}
        total = sum(prod(part.shape) * part.dtype.itemsize for part in self._own.values())
        try:
            with task(f"writing {name}", total, "B") as advance:
                for piece, part in self._own.items():
                    file.write(bytes(-file.position % archive.ALIGNMENT))
                    start = file.position
                    head, tail = archive.around(tuple(part.shape), part.dtype)
                    file.write(head)
                    for block in archive.elements(part):
                        file.write(block)
                    file.write(tail)
                    places[piece] = (start, file.position - start)
                    advance(file.position - start)
            return Written(name, file.close(), places)
        finally:
            file.abandon()
            self.doing = "waiting for other ranks"

    def finish(
        self,
        folder: Place,
        commit: Callable[[dict[str, FileSum]], None],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Write, and wait for all ranks; then rank 0 writes the table of contents and commits.
        Collective.

        Args:
            commit: function that takes the hashes of all files with tensors.
            group: process group of all ranks; None is the default group.

        Raises:
            CheckpointError, StorageError: on all ranks, if any failed to write.
        """

        def commit_all(written: list[Written | None]) -> list[bool]:
            assert self._metadata is not None
            self.doing = f"writing {folder / METADATA_FILE} and the manifest"
            files = [part for part in written if part is not None]
            self._metadata.storage_data = {
                MetadataIndex(name, offset): dcp_place(part.file, start, length)
                for part in files
                for (name, offset), (start, length) in part.places.items()
            }
            table = HashedFile(folder / METADATA_FILE)
            table.write(pickle.dumps(self._metadata))
            commit({part.file: part.sum for part in files} | {METADATA_FILE: table.close()})
            return [True] * len(written)

        through_rank_zero(lambda: self.write(folder), commit_all, group)


def _offer(slices: Slices) -> _Offer:
    parts = tuple((offset, tuple(part.shape)) for offset, part in slices.parts.items())
    return _Offer(slices.shape, next(iter(slices.parts.values())).dtype, parts, slices.replica)


def _kind(part: Tensor) -> tuple[torch.Size, torch.dtype]:
    return part.shape, part.dtype


def _one_writer_each(offers: list[dict[str, _Offer]]) -> list[list[Piece]]:
    """Choose a writer for each piece, evenly: pieces with the fewest holders first, then the
    largest."""
    holders: dict[Piece, list[int]] = {}
    shapes: dict[Piece, tuple[int, ...]] = {}
    size: dict[Piece, int] = {}
    for rank, piece, shape, dtype in _pieces(offers, replicas=False):
        holders.setdefault(piece, []).append(rank)
        shapes[piece], size[piece] = shape, prod(shape) * dtype.itemsize
    for rank, piece, shape, _ in _pieces(offers, replicas=True):
        if shapes.get(piece) == shape:
            holders[piece].append(rank)
    load = [0] * len(offers)
    assigned: list[list[Piece]] = [[] for _ in offers]
    for piece in sorted(holders, key=lambda piece: (len(holders[piece]), -size[piece])):
        writer = min(holders[piece], key=load.__getitem__)
        assigned[writer].append(piece)
        load[writer] += size[piece]
    return assigned


def _pieces(
    offers: list[dict[str, _Offer]], *, replicas: bool
) -> Iterator[tuple[int, Piece, tuple[int, ...], torch.dtype]]:
    """Yield rank, piece, shape and dtype of all offered slices, either replicas or the others."""
    for rank, offered in enumerate(offers):
        for name, offer in offered.items():
            for offset, shape in offer.parts if offer.replica == replicas else ():
                yield rank, (name, offset), shape, offer.dtype


def _describe(offers: list[dict[str, _Offer]], notes: Notes) -> Metadata:
    """Make the table of contents, without places.

    Raises:
        CheckpointError: part of a tensor is missing or duplicated, so the checkpoint could not be
            loaded.
    """
    tensors: dict[str, _Offer] = {}
    chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
    wrong: dict[str, str] = {}
    for offered in offers:
        for name, offer in offered.items():
            first = tensors.setdefault(name, offer)
            if (first.shape, first.dtype) != (offer.shape, offer.dtype):
                wrong[name] = f"{name}: {first.dtype} {first.shape} and {offer.dtype} {offer.shape}"
            chunks.setdefault(name, {}).update(() if offer.replica else offer.parts)
    for name, parts in chunks.items():
        covered, whole = sum(map(prod, parts.values())), prod(tensors[name].shape)
        if covered != whole:
            wrong.setdefault(name, f"{name}: {covered} of {whole} elements")
    if wrong:
        raise CheckpointError(
            "The shards of all ranks do not add up to these whole tensors:"
            f" {listed(wrong.values())}. Please report this."
        )
    contents: dict[str, Any] = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=tensors[name].dtype),
            torch.Size(tensors[name].shape),
            [
                ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                for offset, shape in sorted(parts.items())
            ],
        )
        for name, parts in sorted(chunks.items())
    }
    return dcp_metadata(contents, notes)


# Host memory for the tensors of a background save.

_ALIGNMENT = 64
"""Alignment of every tensor, in bytes."""

Key = TypeVar("Key", bound=Hashable)


def allocate_like(parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Allocate contiguous host tensors of the same shapes and dtypes: one piece of memory for those
    of the host, and one, page-locked so that a stream can copy them, for those of GPUs.
    """
    made: dict[Key, Tensor] = {}
    for on_gpu in (False, True):
        chosen = {key: part for key, part in parts.items() if part.is_cuda == on_gpu}
        memory = host_memory(sum(_aligned(part) for part in chosen.values()), page_locked=on_gpu)
        start = 0
        for key, part in chosen.items():
            made[key] = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            start += _aligned(part)
    return {key: made[key] for key in parts}


def _aligned(part: Tensor) -> int:
    return part.nbytes + -part.nbytes % _ALIGNMENT
