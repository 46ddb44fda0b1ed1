"""How rows are dealt to data-parallel ranks."""

from __future__ import annotations

import pytest

from lightning_3d.layout.micro_batch_rows import MicroBatchRows


def micro_batches(
    rows: MicroBatchRows, global_batch: int, order: list[int]
) -> list[dict[int, tuple[int, ...]]]:
    """The rows of each micro-batch, by its number, of each global batch."""
    size, each = rows.micro_batch_size, global_batch // rows.dp
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in range(len(order) // global_batch)]
    for rank in range(rows.dp):
        mine = list(rows.of_rank(rank, order))
        for batch, numbered in enumerate(found):
            for index in range(each // size):
                first = batch * each + index * size
                number = rows.number(rank, index, each // size)
                assert number not in numbered
                assert 0 <= number < rows.total(each // size)
                numbered[number] = tuple(mine[first : first + size])
    return found


@pytest.mark.parametrize(
    ("whole", "size", "global_batch"), [(4, 2, 24), (4, 1, 12), (3, 2, 24), (6, 3, 36), (2, 1, 4)]
)
def test_f48_micro_batches_have_the_same_rows_on_any_number_of_ranks(
    whole: int, size: int, global_batch: int
) -> None:
    order = [7 * row % 101 for row in range(100)][: 100 // global_batch * global_batch]
    expected = micro_batches(MicroBatchRows(whole, whole, size), global_batch, order)
    for batch, numbered in enumerate(expected):
        assert sorted(sum(numbered.values(), ())) == sorted(
            order[batch * global_batch : (batch + 1) * global_batch]
        )
    for dp in range(1, whole):
        if global_batch % (dp * size) == 0:
            assert (
                micro_batches(MicroBatchRows(dp, whole, size), global_batch, order) == expected
            ), dp


def test_with_all_ranks_rows_are_dealt_one_by_one() -> None:
    assert [list(MicroBatchRows(3, 3, 4).of_rank(rank, range(8))) for rank in range(3)] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5],
    ]


@pytest.mark.parametrize(
    ("dp", "whole", "size", "length"), [(2, 3, 2, 46), (3, 4, 1, 39), (1, 4, 2, 21), (3, 5, 2, 3)]
)
def test_each_row_is_read_once(dp: int, whole: int, size: int, length: int) -> None:
    """The last rows of an epoch too, which are no whole micro-batches."""
    dealt = [
        list(MicroBatchRows(dp, whole, size).of_rank(rank, range(length))) for rank in range(dp)
    ]
    assert sorted(sum(dealt, [])) == list(range(length))
    assert {len(rows) for rows in dealt} == {length // dp}


@pytest.mark.parametrize(
    ("dp", "whole", "size", "length"),
    [(2, 2, 1, 12), (2, 3, 2, 46), (3, 4, 1, 39), (1, 4, 2, 21), (3, 5, 2, 3)],
)
def test_skipped_rows_are_the_first_ones(dp: int, whole: int, size: int, length: int) -> None:
    rows = MicroBatchRows(dp, whole, size)
    for rank in range(dp):
        mine = list(rows.of_rank(rank, range(length)))
        for skip in range(len(mine) + 2):
            assert list(rows.of_rank(rank, range(length), skip)) == mine[skip:]


def test_rows_of_a_huge_order_are_skipped_at_once() -> None:
    for rows in (MicroBatchRows(4, 4), MicroBatchRows(3, 4, 2)):
        order = range(12 * 10**14)
        assert next(rows.of_rank(1, order, 10**14)) in order
