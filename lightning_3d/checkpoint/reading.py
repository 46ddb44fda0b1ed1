"""Read tensors by slices from a folder in the format of torch.distributed.checkpoint. Reading needs
no communication.

The only pickle that is loaded is the table of contents, and only known classes are allowed in it.
The table describes each slice; the bytes of a slice are stored in an archive like those of
`torch.save`.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from lightning_3d.checkpoint import torch_archive as archive
from lightning_3d.checkpoint.manifest import is_inside
from lightning_3d.checkpoint.resharding import Slices, overlap, whole
from lightning_3d.checkpoint.writing import METADATA_FILE, Notes
from lightning_3d.compat.torch_checkpoint import read_dcp_metadata
from lightning_3d.errors import CheckpointError, reason
from lightning_3d.storage.remote_path import Place

_BLOCK_BYTES = 64 * 2**20
"""Bytes of a slice that are in memory at most, in addition to the tensor that it is read for."""


@dataclass(frozen=True)
class _Read:
    """A part of a saved slice, and the tensor to fill with it."""

    name: str
    start: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: tuple[int, ...]
    target: Tensor


class TensorFolder:
    """The tensors of one checkpoint, open for reading.

    Args:
        folder: where they are.
        instead: two prefixes. A tensor whose name begins with the first is read from the one whose
            name begins with the second, if there is one.

    Raises:
        CheckpointError: the table of contents cannot be read.

    Attributes:
        notes: what ranks noted at writing.
    """

    def __init__(self, folder: Place, *, instead: tuple[str, str] | None = None) -> None:
        self._folder = folder
        self._metadata = read_dcp_metadata(folder / METADATA_FILE)
        with _explained(folder / METADATA_FILE):
            _check_table(self._metadata)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._read_for = (
            {instead[0] + name: instead[1] + name for name in self.names(instead[1])}
            if instead is not None
            else {}
        )
        self._sorted: dict[str, tuple[list[ChunkStorageMetadata], list[int], int]] = {}
        self.notes: Notes = self._metadata.planner_data or {}

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors whose names start with `prefix`, by the rest of the name."""
        return {
            n.removeprefix(prefix): tuple(entry.size)
            for n, entry in self._tensors.items()
            if n.startswith(prefix)
        }

    def dtype(self, name: str) -> torch.dtype:
        """Type in which the tensor that is read under this name is stored."""
        return self._tensors[self._read_for.get(name, name)].properties.dtype

    @torch.no_grad()
    def read_into(self, targets: Mapping[str, Slices]) -> None:
        """Fill slices in place, converted to their types. Reads only the rows of saved slices that
        overlap them.

        Raises:
            CheckpointError: a file cannot be read, or the checkpoint lacks part of a slice.
        """
        files: dict[str, list[_Read]] = {}
        with _explained(self._folder / METADATA_FILE):
            for name, slices in targets.items():
                for offset, part in slices.parts.items():
                    for file, read in self._reads(name, offset, part):
                        files.setdefault(file, []).append(read)
        for file, reads in sorted(files.items()):
            path = self._folder / file
            try:
                with path.open("rb", buffering=0) as opened:
                    for read in sorted(reads, key=lambda read: read.start):
                        _read(opened, read)
            except Exception as error:  # a damaged file can raise anything
                raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error

    def _reads(self, name: str, offset: tuple[int, ...], part: Tensor) -> list[tuple[str, _Read]]:
        """List what has to be read for one slice, by file."""
        name = self._read_for.get(name, name)
        entry, found, filled = self._tensors[name], [], 0
        for chunk in self._near(name, offset, part):
            common = overlap(offset, tuple(part.shape), tuple(chunk.offsets), tuple(chunk.sizes))
            if common is None:
                continue
            place: Any = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            target = part
            for dim, (start, size) in enumerate(
                zip(common.local_offset, common.shape, strict=True)
            ):
                target = target.narrow(dim, start, size)
            at = tuple(
                whole - begin
                for whole, begin in zip(common.global_offset, chunk.offsets, strict=True)
            )
            read = _Read(
                name,
                place.offset,
                place.length,
                entry.properties.dtype,
                tuple(chunk.sizes),
                at,
                target,
            )
            found.append((place.relative_path, read))
            filled += common.numel
        if filled != part.numel():
            raise CheckpointError(
                f"{self._folder} has only {filled} of the {part.numel()} elements that this rank"
                f" needs of {name}: the checkpoint is incomplete. Use another one."
            )
        return found

    def _near(self, name: str, offset: tuple[int, ...], part: Tensor) -> list[ChunkStorageMetadata]:
        """Saved slices whose rows may overlap a part of a tensor: with many ranks there are
        thousands of others."""
        if not offset:
            return self._tensors[name].chunks
        if name not in self._sorted:
            chunks = sorted(self._tensors[name].chunks, key=lambda chunk: chunk.offsets[0])
            self._sorted[name] = (
                chunks,
                [chunk.offsets[0] for chunk in chunks],
                max(chunk.sizes[0] for chunk in chunks),
            )
        chunks, firsts, tallest = self._sorted[name]
        return chunks[
            bisect_left(firsts, offset[0] - tallest + 1) : bisect_left(
                firsts, offset[0] + part.shape[0]
            )
        ]

    def blobs(self, prefix: str) -> dict[str, bytes]:
        """Entries that are not tensors, by the rest of their names: raw files of `torch.save`."""
        found = {}
        with _explained(self._folder):
            for index, place in self._metadata.storage_data.items():
                if index.fqn.startswith(prefix) and index.fqn not in self._tensors:
                    with (self._folder / place.relative_path).open("rb") as file:
                        file.seek(place.offset)
                        found[index.fqn.removeprefix(prefix)] = file.read(place.length)
        return found

    def read(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU."""
        with _explained(self._folder / METADATA_FILE):
            tensor = torch.empty(self._tensors[name].size, dtype=self.dtype(name))
        self.read_into({name: whole(tensor)})
        return tensor


@contextlib.contextmanager
def _explained(path: Place) -> Iterator[None]:
    """Turn whatever a table of contents that somebody has made or changed raises into one
    message."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged: {reason(error)}. Use another checkpoint."
        ) from error


def _check_table(metadata: Any) -> None:
    """Raise an exception if this is not a table of contents, or if it names files outside its
    folder."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"it has a {type(metadata).__name__} in it")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shapes = [
                entry.size,
                *(chunk.sizes for chunk in entry.chunks),
                *(chunk.offsets for chunk in entry.chunks),
            ]
            if not isinstance(entry.properties.dtype, torch.dtype) or not all(
                isinstance(shape, torch.Size) for shape in shapes
            ):
                raise TypeError(f"{name} has no valid shape or type")
    for index, place in (metadata.storage_data or {}).items():
        if not is_inside(place.relative_path) or min(place.offset, place.length) < 0:
            raise CheckpointError(
                f"The table of contents places {index.fqn} in {place.relative_path!r}, which is"
                " outside its folder."
            )


def _read(file: Any, read: _Read) -> None:
    """Fill the target: in one piece if it is contiguous and has the dtype of the file, otherwise
    some rows at a time."""
    shape, target, at = read.shape or (1,), read.target, read.at or (0,)
    if not read.shape:
        target = target.view(1)
    row_bytes = prod(shape[1:]) * read.dtype.itemsize
    start = read.start + _data_offset(file, read) + at[0] * row_bytes
    if (
        target.shape[1:] == shape[1:]
        and target.dtype == read.dtype
        and target.is_contiguous()
        and target.device.type == "cpu"
    ):
        _fill(file, start, target.reshape(-1).view(torch.uint8).numpy().data, read.name)
        return
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, target.shape[0], step):
        rows = min(step, target.shape[0] - first)
        buffer = bytearray(rows * row_bytes)
        _fill(file, start + first * row_bytes, memoryview(buffer), read.name)
        block = torch.frombuffer(buffer, dtype=read.dtype).view(rows, *shape[1:])
        for dim in range(1, len(shape)):
            block = block.narrow(dim, at[dim], target.shape[dim])
        target.narrow(0, first, rows).copy_(block)


def _fill(file: Any, start: int, buffer: memoryview, name: str) -> None:
    """Read until the buffer is full: one call returns at most 2 GB."""
    done = 0
    file.seek(start)
    while done < buffer.nbytes:
        count = file.readinto(buffer[done:])
        if not count:
            raise EOFError(f"the file ends at byte {start + done}, within {name}")
        done += count


def _data_offset(file: Any, read: _Read) -> int:
    """Find the offset of a slice's elements in its archive. Reading the directory at its end would
    take five times as long."""
    file.seek(read.start)
    beginning, nbytes = (
        file.read(min(archive.HEAD_BYTES, read.length)),
        prod(read.shape) * read.dtype.itemsize,
    )
    try:
        data = archive.elements_at(beginning)
    except ValueError as error:
        raise ValueError(f"the bytes of {read.name} are damaged: {error}") from None
    if data + nbytes > read.length:
        raise ValueError(
            f"{read.name} is truncated: {nbytes} bytes were expected, but the file ends earlier"
        )
    return data
