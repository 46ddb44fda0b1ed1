"""Who computes with which matrix, and which pieces travel, for optimizers that need whole matrices
(`matrix_exchange`).

Each matrix has one owner among the ranks of a pipeline stage: the largest matrices first, each goes
to the rank with the least work (Graham, "Bounds on multiprocessing timing anomalies", 1969). All
ranks compute the same plan from the same table of pieces. Matrices are processed in rounds, which
bounds the memory of the messages.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_3d.parallel.sharding import Box
from lightning_3d.parallel.zero.matrix_pieces import Key, Piece

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
