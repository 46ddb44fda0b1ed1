"""Whole matrices for an optimizer whose matrices are sharded over the ranks of a pipeline stage:
pieces, plan and exchange.

A matrix is what it is in the unsharded model: a parameter with two dimensions, a fused one too, or
one entry of a stack (experts, rows, columns). Tensor parallelism gives a rank some rectangles of a
matrix, expert parallelism some entries of a stack, and ZeRO a range of the elements of these.

Each matrix has one owner among the ranks of a pipeline stage: the largest matrices first, each goes
to the rank with the least work (Graham, "Bounds on multiprocessing timing anomalies", 1969). All
ranks compute the same plan from the same table of pieces. Matrices are processed in rounds, which
bounds the memory of the messages. In each round the pieces of a matrix travel to its owner, which
computes with the whole matrix, and parts of the result travel back to all ranks that hold such
pieces. Both are all-to-alls in bfloat16. Copies on several ranks get the same bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.sharding import Box, ShardSpec
from lightning_3d.parallel.witness import received, sent

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


ROUND = 2**24
"""Most elements of a rank's matrices in one round, unless a single matrix has more; 32 MiB in
bfloat16. It also bounds what a rank returns in one message."""


@dataclass(frozen=True)
class Matrix:
    """A matrix and its ranks, counted in the group.

    Attributes:
        key: its name.
        shape: (rows, columns).
        owner: rank that computes with it.
        sources: pieces that together are the whole matrix, with their ranks, each as near to the
            owner as possible.
        holders: all pieces, with their ranks.
    """

    key: Key
    shape: tuple[int, ...]
    owner: int
    sources: tuple[tuple[int, Piece], ...]
    holders: tuple[tuple[int, Piece], ...]

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


def plan_rounds(table: Sequence[Sequence[Piece]], *, complete: bool = True) -> list[list[Matrix]]:
    """Plan the matrices of each round.

    Args:
        table: the pieces of each rank of the group.
        complete: whether the table must have every element; a dry run knows only a part of it.

    Raises:
        RuntimeError: no rank holds some elements of a matrix.
    """
    holders: dict[Key, list[tuple[int, Piece]]] = {}
    for rank, pieces in enumerate(table):
        for piece in pieces:
            holders.setdefault(piece.key, []).append((rank, piece))
    shapes = {key: held[0][1].spec.global_shape for key, held in holders.items()}
    order = sorted(holders, key=lambda key: (-work(shapes[key]), key))
    owned: list[list[Matrix]] = [[] for _ in table]
    loads = [(0, rank) for rank in range(len(table))]
    for key in order:
        load, owner = heapq.heappop(loads)
        sources, covered = _sources(holders[key], owner)
        if complete and covered < shapes[key][0] * shapes[key][1]:
            raise RuntimeError(f"No rank of the stage holds some elements of '{key[0]}'.")
        owned[owner].append(Matrix(key, shapes[key], owner, tuple(sources), tuple(holders[key])))
        heapq.heappush(loads, (load + work(shapes[key]), owner))
    return _rounds(owned)


def work(shape: Sequence[int]) -> int:
    """Multiplications of one Newton-Schulz iteration, which works on the smaller side: X X', its
    square, and the product with X."""
    small, large = sorted(shape)
    return small * small * (2 * large + small)


def returned_parts(matrices: Iterable[Matrix], ranks: int) -> int:
    """Messages in which the results of a round are returned, so that none is much larger than a
    round's matrices."""
    sent = [0] * ranks
    for matrix in matrices:
        sent[matrix.owner] += sum(piece.numel for _, piece in matrix.holders)
    return max(1, -(-max(sent) // ROUND))


def _rounds(owned: Sequence[Sequence[Matrix]]) -> list[list[Matrix]]:
    """In a round each rank has its next matrix, or several small ones."""
    rounds: list[list[Matrix]] = []
    most = 0
    for turn in range(max(map(len, owned), default=0)):
        taken = [own[turn] for own in owned if turn < len(own)]
        largest = max(matrix.numel for matrix in taken)
        if rounds and most + largest <= ROUND:
            rounds[-1] += taken
            most += largest
        else:
            rounds.append(taken)
            most = largest
    return rounds


def _sources(
    holders: Sequence[tuple[int, Piece]], owner: int
) -> tuple[list[tuple[int, Piece]], int]:
    """(pieces with every element that a rank has, number of elements of their rectangles that they
    cover).

    The owner's come first, then those of ranks with near numbers, which are on its node.
    """
    chosen: list[tuple[int, Piece]] = []
    covered: dict[tuple[Box, ...], _Runs] = {}
    for rank, piece in sorted(
        holders, key=lambda held: (abs(held[0] - owner), held[0], held[1].start)
    ):
        runs = covered.setdefault(piece.spec.boxes, _Runs())
        if not runs.have(piece.start, piece.stop):
            chosen.append((rank, piece))
            runs.add(piece.start, piece.stop)
    return chosen, sum(map(len, covered.values()))


class _Runs:
    """Ranges of numbers, apart from each other."""

    def __init__(self) -> None:
        self._runs: list[range] = []

    def have(self, start: int, stop: int) -> bool:
        return any(run.start <= start and stop <= run.stop for run in self._runs)

    def add(self, start: int, stop: int) -> None:
        touching = [run for run in self._runs if run.start <= stop and start <= run.stop]
        whole = range(
            min([start, *(run.start for run in touching)]),
            max([stop, *(run.stop for run in touching)]),
        )
        self._runs = [*(run for run in self._runs if run not in touching), whole]

    def __len__(self) -> int:
        return sum(map(len, self._runs))


DTYPE = torch.bfloat16
"""Newton-Schulz iterations are in this type, so that rounding before sending changes nothing."""


@dataclass(frozen=True)
class _Round:
    """What this rank does in a round. Messages to and from ranks come in the order of the ranks.

    Attributes:
        gives: its pieces that travel to owners, for each rank.
        gets: pieces of its own matrices, for each rank that they come from.
        returns: pieces of the results of its own matrices, for each rank that they go to.
        results: its pieces of all results, for each rank that they come from.
        parts: number of messages in which results travel.
    """

    gives: list[list[HeldPiece]]
    gets: list[list[Piece]]
    returns: list[list[Piece]]
    results: list[list[HeldPiece]]
    parts: int


class MatrixExchange:
    """Computes with whole matrices on their owners.

    Args:
        held: this rank's pieces.
        group: the ranks of the stage.
        device: device of the messages.
        table: the pieces of each rank; None: they are gathered, in one collective.
    """

    def __init__(
        self,
        held: Sequence[HeldPiece],
        group: dist.ProcessGroup,
        device: torch.device,
        table: list[list[Piece]] | None = None,
    ) -> None:
        self._group, self._device = group, device
        everyone = table if table is not None else _gather([each.piece for each in held], group)
        rank = dist.get_rank(group)
        own = {(each.piece.key, each.piece.start): each for each in held}
        rounds = plan_rounds(everyone, complete=table is None)
        self._rounds = [_round(matrices, rank, len(everyone), own) for matrices in rounds]

    def run(
        self,
        give: Callable[[HeldPiece], Tensor],
        compute: Callable[[Tensor], Tensor],
        take: Callable[[HeldPiece, int, Tensor], None],
    ) -> None:
        """Compute with every matrix of the stage. All ranks of the group call it.

        Args:
            give: elements of a piece, one-dimensional, which are rounded to bfloat16.
            compute: gets a whole matrix in bfloat16, which it may overwrite, and returns one of the
                same shape and type.
            take: gets a piece, the first of its elements that have arrived, and the result's values
                of these.
        """
        for each in self._rounds:
            results = {
                key: compute(matrix) for key, matrix in self._gather_matrices(each, give).items()
            }
            self._return_results(each, results, take)

    def _gather_matrices(
        self, each: _Round, give: Callable[[HeldPiece], Tensor]
    ) -> dict[Key, Tensor]:
        """This rank's matrices of a round, whole."""
        gives = [[give(held).to(DTYPE) for held in held_of_rank] for held_of_rank in each.gives]
        arrived = self._all_to_all(
            gives, [[piece.numel for piece in pieces] for pieces in each.gets]
        )
        locals_: dict[tuple[Key, tuple[Box, ...]], tuple[Piece, Tensor]] = {}
        for piece, values in zip(chain.from_iterable(each.gets), arrived, strict=True):
            _, local = locals_.setdefault(
                (piece.key, piece.spec.boxes), (piece, self._empty(piece.spec.local_shape))
            )
            local.view(-1)[piece.start : piece.stop] = values
        wholes: dict[Key, Tensor] = {}
        for piece, local in locals_.values():
            if piece.spec.is_cut:
                piece.spec.paste(
                    local, wholes.setdefault(piece.key, self._empty(piece.spec.global_shape))
                )
            else:
                wholes[piece.key] = local
        return wholes

    def _return_results(
        self,
        each: _Round,
        results: dict[Key, Tensor],
        take: Callable[[HeldPiece, int, Tensor], None],
    ) -> None:
        """Give every rank its pieces of the results of a round."""
        shards: dict[tuple[Key, tuple[Box, ...]], Tensor] = {}
        for piece in chain.from_iterable(each.returns):
            place = (piece.key, piece.spec.boxes)
            if place not in shards:  # several ranks may hold it
                shards[place] = piece.spec.cut(results[piece.key]).view(-1)
        for part in range(each.parts):
            returns = [
                [
                    self._part(shards[piece.key, piece.spec.boxes], piece, part, each.parts)
                    for piece in ps
                ]
                for ps in each.returns
            ]
            sizes = [
                [len(range(*_bounds(held.piece, part, each.parts))) for held in pieces]
                for pieces in each.results
            ]
            for held, values in zip(
                chain.from_iterable(each.results), self._all_to_all(returns, sizes), strict=True
            ):
                take(held, _bounds(held.piece, part, each.parts)[0], values)

    @staticmethod
    def _part(shard: Tensor, piece: Piece, part: int, parts: int) -> Tensor:
        start, stop = _bounds(piece, part, parts)
        return shard[piece.start + start : piece.start + stop]

    def _all_to_all(
        self, gives: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Send one-dimensional tensors to each rank, and return those of the given sizes that come
        from each."""
        flat = torch.cat([self._empty((0,)), *chain.from_iterable(gives)])
        whole = flat
        if len(sizes) > 1:
            whole = self._empty((sum(map(sum, sizes)),))
            sent("all-to-all", flat)
            out = [sum(map(len, tensors)) for tensors in gives]
            gloo_exchange.all_to_all(
                whole, flat, [sum(of_rank) for of_rank in sizes], out, self._group
            )
            received("all-to-all", whole)
        return list(whole.split(list(chain.from_iterable(sizes))))

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=DTYPE, device=self._device)


def pretended_table(own: list[Piece], ranks: int, rank: int, *, sharded: bool) -> list[list[Piece]]:
    """A table for a dry run, where other ranks do not say what they hold.

    Args:
        own: this rank's pieces.
        ranks: number of ranks in the group.
        rank: this rank's number.
        sharded: whether ZeRO shards state: then others have as much of other matrices. Otherwise
            they have the same, which leaves out that tensor-parallel ranks send their shards to
            owners.
    """
    if not sharded:
        return [own] * ranks
    table = [
        [replace(piece, key=(f"{piece.key[0]} of rank {other}", piece.key[1])) for piece in own]
        for other in range(ranks)
    ]
    table[rank] = own
    return table


def _gather(own: list[Piece], group: dist.ProcessGroup) -> list[list[Piece]]:
    everyone: list[list[Piece]] = [own]
    if dist.get_world_size(group) > 1:
        everyone = [[]] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
    return everyone


def _round(
    matrices: Sequence[Matrix], rank: int, ranks: int, own: dict[tuple[Key, int], HeldPiece]
) -> _Round:
    gives: list[list[HeldPiece]] = [[] for _ in range(ranks)]
    gets: list[list[Piece]] = [[] for _ in range(ranks)]
    returns: list[list[Piece]] = [[] for _ in range(ranks)]
    results: list[list[HeldPiece]] = [[] for _ in range(ranks)]
    for matrix in matrices:
        for holder, piece in matrix.sources:
            if holder == rank:
                gives[matrix.owner].append(own[piece.key, piece.start])
            if matrix.owner == rank:
                gets[holder].append(piece)
        for holder, piece in matrix.holders:
            if holder == rank:
                results[matrix.owner].append(own[piece.key, piece.start])
            if matrix.owner == rank:
                returns[holder].append(piece)
    return _Round(gives, gets, returns, results, returned_parts(matrices, ranks))


def _bounds(piece: Piece, part: int, parts: int) -> tuple[int, int]:
    """Range of a piece's elements that travel in a part."""
    return piece.numel * part // parts, piece.numel * (part + 1) // parts
