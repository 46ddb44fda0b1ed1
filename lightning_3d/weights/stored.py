"""Places of parameter values in safetensors files: one tensor, or several that tile the parameter.

Checkpoints of mixtures store each expert separately, and its gate and up projections separately
too. The model has all of them in one tensor. A rank reads only the parts that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_3d.errors import CheckpointError
from lightning_3d.models.safetensors_folder import StoredTensor
from lightning_3d.parallel.sharding import Box, ShardSpec


@dataclass(frozen=True)
class StoredPiece:
    """A stored tensor and its offset in the parameter. Missing leading dimensions have size 1."""

    tensor: StoredTensor
    offset: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,) * (len(self.offset) - len(self.tensor.shape)) + self.tensor.shape

    def overlap(self, box: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Intersect with a shard: slices of the stored tensor and of the shard; None if they do not
        overlap."""
        stored, local = [], []
        for begin, size, start, place, length in zip(
            self.offset, self.shape, box.global_offset, box.local_offset, box.shape, strict=True
        ):
            first, last = max(begin, start), min(begin + size, start + length)
            if first >= last:
                return None
            stored.append(slice(first - begin, last - begin))
            local.append(slice(place + first - start, place + last - start))
        return tuple(stored[len(self.offset) - len(self.tensor.shape) :]), tuple(local)


@dataclass(frozen=True)
class StoredValue:
    """A whole parameter in files.

    Attributes:
        shape: shape of the parameter.
        pieces: stored tensors that tile it.
    """

    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @classmethod
    def of(cls, tensor: StoredTensor) -> StoredValue:
        """Describe a parameter that is stored as one tensor."""
        return cls(tensor.shape, (StoredPiece(tensor, (0,) * len(tensor.shape)),))

    @property
    def name(self) -> str:
        """Name of its tensor, or of the first of several."""
        return self.pieces[0].tensor.name

    @property
    def folder(self) -> Path:
        return self.pieces[0].tensor.file.parent

    @property
    def tensors(self) -> Iterator[StoredTensor]:
        return (piece.tensor for piece in self.pieces)


@dataclass(frozen=True)
class Tiling:
    """Recipe for building a parameter from stored tensors, by stacking equal ones, then
    concatenating the stacks.

    Attributes:
        stacked: tensors whose names differ in a number are stacked along a new first dimension, in
            the order of the numbers.
        dim: dimension of the parameter along which the stacks (or tensors) of several names are
            concatenated; None for one name.
    """

    stacked: bool
    dim: int | None

    def tile(self, name: str, columns: Mapping[str, Sequence[StoredTensor]]) -> StoredValue:
        """The parameter.

        Args:
            columns: the tensors of each name in the order in which they are concatenated, each in
                the order in which they are stacked.

        Raises:
            CheckpointError: some are missing, or their shapes do not fit together.
        """
        heights = {pattern: len(tensors) for pattern, tensors in columns.items()}
        if len(set(heights.values())) > 1:
            counts = ", ".join(f"{count} of {pattern}" for pattern, count in heights.items())
            raise CheckpointError(
                f"The files lack some parts of '{name}': they have {counts}, but the numbers must"
                " be equal. Copy or download them again."
            )
        pieces: list[StoredPiece] = []
        edge = 0
        for tensors in columns.values():
            for index, tensor in enumerate(tensors):
                offset = [index] * self.stacked + [0] * len(tensor.shape)
                if self.dim is not None:
                    offset[self.dim] += edge
                pieces.append(StoredPiece(tensor, tuple(offset)))
            edge += pieces[-1].shape[self.dim] if self.dim is not None else 0
        shape = tuple(
            max(piece.offset[dim] + piece.shape[dim] for piece in pieces)
            for dim in range(len(pieces[0].offset))
        )
        for piece in pieces:
            for dim, (size, whole) in enumerate(zip(piece.shape, shape, strict=True)):
                if size != whole and dim != self.dim and not (dim == 0 and self.stacked):
                    raise CheckpointError(
                        f"'{piece.tensor.name}' has the shape {list(piece.tensor.shape)} in"
                        f" {piece.tensor.file}, which does not fit into '{name}' of shape"
                        f" {list(shape)}. Copy or download the files again."
                    )
        return StoredValue(shape, tuple(pieces))


class StoredReader:
    """Reads parts of stored tensors. Keeps the last file open."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: Any = None

    def read(
        self,
        stored: Sequence[StoredValue],
        spec: ShardSpec,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Tensor:
        """Read this rank's shard, of shape `spec.local_shape`, as `dtype` on `device`.

        Args:
            stored: stored values; several for tied parameters that were saved under each of their
                names.

        Raises:
            CheckpointError: a file cannot be read, or tied parameters have two values.
        """
        first, *others = (self._read(value, spec, dtype, device) for value in stored)
        for value, other in zip(stored[1:], others, strict=True):
            if not torch.equal(first, other):
                raise CheckpointError(
                    f"'{stored[0].name}' and '{value.name}' have different values in"
                    f" {value.folder}, but the model ties them. Set tie_word_embeddings to false in"
                    " its configuration."
                )
        return first

    def _read(
        self, stored: StoredValue, spec: ShardSpec, dtype: torch.dtype, device: torch.device | str
    ) -> Tensor:
        local = torch.empty(spec.local_shape, dtype=dtype, device=device)
        for piece in stored.pieces:
            try:
                if not stored.shape:
                    return local.copy_(self._open(piece.tensor.file).get_tensor(piece.tensor.name))
                for box in spec.boxes:
                    found = piece.overlap(box)
                    if found is not None:
                        local[found[1]] = self._open(piece.tensor.file).get_slice(
                            piece.tensor.name
                        )[found[0]]
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{piece.tensor.file} cannot be read: {error}. Copy or download it again."
                ) from error
        return local

    def _open(self, path: Path) -> Any:
        if path != self._path:
            self._path, self._file = None, None  # unmap this file before mapping the next one
            self._file, self._path = safe_open(path, framework="pt", device="cpu"), path
        return self._file
