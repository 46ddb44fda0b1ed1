"""Owners of matrices: every element arrives once, and ranks have about the same work."""

import random

import pytest
from handmade_gradients import LAYERS

from lightning_3d.parallel.sharding import Box, ShardSpec, cut_along, even_range, replicated
from lightning_3d.parallel.zero.matrices import Matrix, Piece, pieces_of, plan_rounds, work

SHAPES = [(256, 256), (128, 256), (128, 256), (256, 256), (688, 256), (688, 256), (256, 688)]


def table(ranks: int, tp: int, dp_shards: int) -> list[list[Piece]]:
    """`ranks` = tp * dp ranks, tp innermost; dp_shards ranks share the elements of what a
    tensor-parallel rank has."""
    rows = []
    for rank in range(ranks):
        pieces = []
        for layer in range(LAYERS):
            for number, shape in enumerate(SHAPES):
                part = even_range(shape[number % 2], tp, rank % tp)
                spec = cut_along(
                    f"{layer}.{number}", shape, number % 2, [part], tp_replicas=(rank % tp,)
                )
                size = spec.local_shape[0] * spec.local_shape[1]
                start, numel = even_range(size, dp_shards, rank // tp % dp_shards)
                pieces.append(Piece((spec.name, 0), spec, start, start + numel))
        rows.append(pieces)
    return rows


@pytest.mark.parametrize(
    ("ranks", "tp", "shards"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (6, 1, 3), (8, 2, 2)]
)
@pytest.mark.parametrize("limit", [1, 2**18, 2**24])
def test_every_element_has_one_source(
    ranks: int, tp: int, shards: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_3d.parallel.zero.matrices.ROUND", limit)
    rounds = plan_rounds(table(ranks, tp, shards))
    matrices = [matrix for each in rounds for matrix in each]
    assert len({matrix.key for matrix in matrices}) == len(matrices) == LAYERS * len(SHAPES)
    for matrix in matrices:
        assert sum(piece.numel for _, piece in matrix.sources) == matrix.shape[0] * matrix.shape[1]
        assert len({(piece.spec.boxes, piece.start) for _, piece in matrix.sources}) == len(
            matrix.sources
        )
        assert len(matrix.holders) == ranks
    loads = [
        sum(work(matrix.shape) for matrix in matrices if matrix.owner == rank)
        for rank in range(ranks)
    ]
    assert max(loads) <= sum(loads) / ranks + max(work(matrix.shape) for matrix in matrices)
    for each in rounds:
        of_ranks = [[matrix for matrix in each if matrix.owner == rank] for rank in range(ranks)]
        assert all(
            len(own) == 1 or sum(matrix.numel for matrix in own) <= limit for own in of_ranks if own
        )


def test_sources_are_near_the_owner() -> None:
    """With whole copies on data-parallel ranks, a matrix is gathered from one replica: that of its
    owner."""
    for matrix in (matrix for each in plan_rounds(table(8, 2, 1)) for matrix in each):
        assert {rank // 2 for rank, _ in matrix.sources} <= {
            matrix.owner // 2,
            (matrix.owner - 1) // 2,
            (matrix.owner + 1) // 2,
        }


def test_the_same_plan_on_every_rank() -> None:
    assert plan_rounds(table(4, 2, 2)) == plan_rounds(table(4, 2, 2))


def test_pieces_of_a_stack() -> None:
    """Every element of a range lies in the piece of its own matrix."""
    box = Box((4, 0, 2), (0, 0, 0), (3, 5, 2))  # experts 4 to 6, half of the columns
    spec = ShardSpec("experts", (8, 5, 4), (box,), expert=True)
    generator = random.Random(0)
    for _ in range(20):
        first = generator.randrange(29)
        numel = generator.randrange(1, 30 - first + 1)
        tensor = object()
        found = list(pieces_of(tensor, 100, spec, first, numel))  # type: ignore[arg-type]
        elements = [
            (each.piece.key[1], element, each.offset + element - each.piece.start)
            for each in found
            for element in range(each.piece.start, each.piece.stop)
        ]
        assert elements == [
            (4 + index // 10, index % 10, 100 + index - first)
            for index in range(first, first + numel)
        ]
        assert all(
            each.piece.spec.boxes == (Box((0, 2), (0, 0), (5, 2)),)
            and each.piece.spec.global_shape == (5, 4)
            for each in found
        )


def test_missing_elements_are_an_error() -> None:
    spec = replicated("a", (4, 4), 1)
    with pytest.raises(RuntimeError, match="No rank of the stage holds some elements of 'a'"):
        plan_rounds([[Piece(("a", 0), spec, 0, 8)], [Piece(("a", 0), spec, 0, 4)]])
    [[matrix]] = plan_rounds([[Piece(("a", 0), spec, 0, 8)], [Piece(("a", 0), spec, 4, 16)]])
    assert isinstance(matrix, Matrix) and len(matrix.sources) == 2
