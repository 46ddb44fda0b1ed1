"""Reading tensors by slices from a folder in the format of torch.distributed.checkpoint. Reading needs no other rank.

No pickle is loaded but the table of contents, of which only known classes are let through: what a slice is stands there, and its bytes
lie as they are in the archive that `torch.save` made of it.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from lightning_3d.checkpoint.agreement import reason
from lightning_3d.checkpoint.slices import Slices, overlap, whole
from lightning_3d.checkpoint.writing import METADATA_FILE, Notes
from lightning_3d.errors import CheckpointError
from lightning_3d.lightning_compat import read_dcp_metadata
from lightning_3d.remote_path import Place

_BLOCK_BYTES = 64 * 2**20
"""At most so much of a slice is in memory beside the tensor that it is read for."""


@dataclass(frozen=True)
class _Read:
    """A part of a saved slice, and the tensor that it is for."""

    name: str
    start: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: tuple[int, ...]
    target: Tensor


class TensorFolder:
    """The tensors of one checkpoint, open for reading.

    Attributes:
        notes: what ranks noted at writing.
    """

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._metadata = read_dcp_metadata(folder / METADATA_FILE)
        self._tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.notes: Notes = self._metadata.planner_data or {}

    def names(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors whose names begin with `prefix`, by the rest of the name."""
        return {n.removeprefix(prefix): tuple(entry.size) for n, entry in self._tensors.items() if n.startswith(prefix)}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    @torch.no_grad()
    def read_into(self, targets: Mapping[str, Slices]) -> None:
        """Fill slices in place, converted to their types. Reads only the rows of saved slices that overlap them.

        Raises:
            CheckpointError: a file cannot be read, or the checkpoint lacks a part.
        """
        files: dict[str, list[_Read]] = {}
        for name, slices in targets.items():
            for offset, part in slices.parts.items():
                for file, read in self._reads(name, offset, part):
                    files.setdefault(file, []).append(read)
        for file, reads in sorted(files.items()):
            path = self._folder / file
            try:
                with path.open("rb") as opened:
                    for read in sorted(reads, key=lambda read: read.start):
                        _read(opened, read)
            except Exception as error:  # whatever a damaged file makes of it
                raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error

    def _reads(self, name: str, offset: tuple[int, ...], part: Tensor) -> list[tuple[str, _Read]]:
        """What has to be read for one slice, by file."""
        entry, found, filled = self._tensors[name], [], 0
        for chunk in entry.chunks:
            common = overlap(offset, tuple(part.shape), tuple(chunk.offsets), tuple(chunk.sizes))
            if common is None:
                continue
            place: Any = self._metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            target = part
            for dim, (start, size) in enumerate(zip(common.local_offset, common.shape, strict=True)):
                target = target.narrow(dim, start, size)
            at = tuple(whole - begin for whole, begin in zip(common.global_offset, chunk.offsets, strict=True))
            read = _Read(name, place.offset, place.length, entry.properties.dtype, tuple(chunk.sizes), at, target)
            found.append((place.relative_path, read))
            filled += common.numel
        if filled != part.numel():
            raise CheckpointError(f"{self._folder} has {filled} of the {part.numel()} elements of a slice of {name}.")
        return found

    def blobs(self, prefix: str) -> dict[str, bytes]:
        """What is no tensor, by the rest of its name: files of `torch.save`, as they are."""
        found = {}
        for index, place in self._metadata.storage_data.items():
            if index.fqn.startswith(prefix) and index.fqn not in self._tensors:
                with (self._folder / place.relative_path).open("rb") as file:
                    file.seek(place.offset)
                    found[index.fqn.removeprefix(prefix)] = file.read(place.length)
        return found

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        tensor = torch.empty(self._tensors[name].size, dtype=self.dtype(name))
        self.read_into({name: whole(tensor)})
        return tensor


def _read(file: BinaryIO, read: _Read) -> None:
    """Fill the target, some rows at a time: those are neighbours in the file."""
    start = read.start + _data_offset(file, read)
    shape, target, at = read.shape or (1,), read.target, read.at or (0,)
    if not read.shape:
        target = target.view(1)
    row_bytes = prod(shape[1:]) * read.dtype.itemsize
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, target.shape[0], step):
        rows = min(step, target.shape[0] - first)
        buffer = bytearray(rows * row_bytes)
        file.seek(start + (at[0] + first) * row_bytes)
        if file.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            raise EOFError(f"{read.name} ends after {file.tell()} bytes")
        block = torch.frombuffer(buffer, dtype=read.dtype).view(rows, *shape[1:])
        for dim in range(1, len(shape)):
            block = block.narrow(dim, at[dim], target.shape[dim])
        target.narrow(0, first, rows).copy_(block)


def _data_offset(file: BinaryIO, read: _Read) -> int:
    """Where in the archive of `torch.save` the elements begin: they are stored as they are."""
    with zipfile.ZipFile(_Window(file, read.start, read.length)) as archive:
        [entry] = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    expected = prod(read.shape) * read.dtype.itemsize
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != expected:
        raise ValueError(f"{read.name} has {entry.file_size} bytes there instead of {expected}")
    header = 30  # bytes of a local file header (ZIP application note, 4.3.7), of which the last four are two lengths
    file.seek(read.start + entry.header_offset + header - 4)
    return entry.header_offset + header + sum(struct.unpack("<HH", file.read(4)))


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = min(max(0, base + offset), self._length)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: self._length - self._at]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count
