"""Whole matrices for an optimizer whose matrices are sharded over the ranks of a pipeline stage.

In each round the pieces of a matrix travel to its owner (`matrix_plan`), which computes with the
whole matrix, and parts of the result travel back to all ranks that hold such pieces. Both are
all-to-alls in bfloat16. Copies on several ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.sharding import Box
from lightning_3d.parallel.witness import received, sent
from lightning_3d.parallel.zero.matrix_pieces import HeldPiece, Key, Piece
from lightning_3d.parallel.zero.matrix_plan import Matrix, plan_rounds, returned_parts

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
