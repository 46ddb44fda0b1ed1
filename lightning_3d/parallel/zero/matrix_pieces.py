"""Pieces of weight matrices in the tensors that a rank's optimizer trains.

A matrix is what it is in the unsharded model: a parameter with two dimensions, a fused one too, or
one entry of a stack (experts, rows, columns). Tensor parallelism gives a rank some rectangles of a
matrix, expert parallelism some entries of a stack, and ZeRO a range of the elements of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.sharding import Box, ShardSpec

Key = tuple[str, int]
"""Name of the parameter in the whole model, and index in the stack."""


@dataclass(frozen=True)
class Piece:
    """Elements of a matrix on one rank.

    Attributes:
        key: the matrix.
        spec: this rank's rectangles of the matrix.
        start: first of the elements, in the row-major flattening of the rectangles' hull.
        stop: end of the elements.
    """

    key: Key
    spec: ShardSpec
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class HeldPiece:
    """A piece and its place on this rank.

    Attributes:
        tensor: what the optimizer trains: a parameter, or a flat part of several. It is contiguous.
        offset: first element of the piece in the flattened tensor.
        piece: what it is in the matrix.
    """

    tensor: Tensor
    offset: int
    piece: Piece

    def part_of(self, like: Tensor) -> Tensor:
        """The piece's elements of a tensor with the shape of `tensor`, flattened; a view if that is
        contiguous."""
        return like.reshape(-1)[self.offset : self.offset + self.piece.numel]


def pieces_of(
    tensor: Tensor, offset: int, spec: ShardSpec, first: int, numel: int
) -> Iterator[HeldPiece]:
    """Find the pieces of matrices in a range of a local parameter.

    Args:
        tensor: what the optimizer trains.
        offset: place of the range in the flattened `tensor`.
        spec: place of the local parameter in the whole one, which has two or three dimensions.
        first: first element of the range in the flattened local parameter.
        numel: number of elements of the range.
    """
    name = spec.tied_to or spec.name
    matrices = (
        [(0, ShardSpec(name, spec.global_shape, spec.boxes))]
        if len(spec.global_shape) == 2
        else _entries(spec, name)
    )
    size = spec.local_shape[-2] * spec.local_shape[-1]
    for place, (index, matrix) in enumerate(matrices):
        start, stop = max(first, place * size), min(first + numel, (place + 1) * size)
        if start < stop:
            piece = Piece((name, index), matrix, start - place * size, stop - place * size)
            yield HeldPiece(tensor, offset + start - first, piece)


def require_matrices(shapes: Iterable[tuple[int, ...]]) -> None:
    """Refuse parameters that are neither matrices nor stacks of matrices.

    Raises:
        ConfigError: with the first of them.
    """
    for shape in shapes:
        if len(shape) not in (2, 3):
            raise ConfigError(
                "Muon trains matrices (2 dimensions) and stacks of matrices (3), but a parameter"
                f" in its groups has the shape {shape}. Train it with AdamW."
            )


def _entries(spec: ShardSpec, name: str) -> list[tuple[int, ShardSpec]]:
    """(index in the whole stack, this rank's rectangles) of each local entry of a stack."""
    found = []
    for place in range(spec.local_shape[0]):
        boxes = [
            box
            for box in spec.boxes
            if box.local_offset[0] <= place < box.local_offset[0] + box.shape[0]
        ]
        [index] = {box.global_offset[0] + place - box.local_offset[0] for box in boxes}
        flat = tuple(
            Box(box.global_offset[1:], box.local_offset[1:], box.shape[1:]) for box in boxes
        )
        found.append((index, ShardSpec(name, spec.global_shape[1:], flat)))
    return found
