"""Rows of batches whose values are not all tensors."""

from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from lightning_3d.errors import DataError
from lightning_3d.parallel.nested import (
    count_rows,
    require_rows_first,
    rows_of,
    strided,
    tensors_of,
)


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclass
class Sample:
    x: Tensor
    names: list[str] = field(default_factory=lambda: ["a", "b", "c", "d"])


class Strange:
    def __init__(self, rows: int) -> None:
        self.x = torch.zeros(rows, 2)


class Encoding(UserDict):  # type: ignore[type-arg]
    pass


X = torch.arange(4)
RAGGED = [torch.zeros(row, 4) for row in (3, 0, 2, 1)]
LAST = slice(2, 4)


def last(value: Any) -> Any:
    batch = {"x": X, "value": value}
    return rows_of(batch, LAST, count_rows(batch))["value"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (["a", "b", "c", "d"], ["c", "d"]),
        (("a", "b", "c", "d"), ("c", "d")),
        ([1, 2, 3, 4], [3, 4]),
        ([None, None, "c", "d"], ["c", "d"]),
        ([[1], [2, 3], [], [4]], [[], [4]]),
        ({"task": ["a", "b", "c", "d"]}, {"task": ["c", "d"]}),
        (range(4), range(2, 4)),
        ("abcd", "abcd"),
        (["setting"], ["setting"]),
        ((224, 224, 3), (224, 224, 3)),
        (None, None),
        (4, 4),
    ],
    ids=str,
)
def test_what_has_as_many_entries_as_rows_is_split(value: Any, expected: Any) -> None:
    assert last(value) == expected


def test_arrays_targets_of_detection_and_samples_of_other_kinds_are_split() -> None:
    assert last(numpy.arange(4)).tolist() == [2, 3] and len(last(numpy.arange(5))) == 5
    assert [len(boxes) for boxes in last(RAGGED)] == [2, 1]
    assert [len(target["boxes"]) for target in last([{"boxes": boxes} for boxes in RAGGED])] == [
        2,
        1,
    ]
    assert last(Sample(X)).names == ["c", "d"] and last(Pair(X, ["a", "b", "c", "d"])).names == [
        "c",
        "d",
    ]
    assert last(Encoding({"names": ["a", "b", "c", "d"]}))["names"] == ["c", "d"]
    images_and_targets = (
        tuple(torch.zeros(3, 5, row + 2) for row in range(4)),
        [{"boxes": boxes} for boxes in RAGGED],
    )
    assert count_rows(images_and_targets) == 4
    assert [len(part) for part in rows_of(images_and_targets, LAST, 4)] == [2, 2]


def test_rows_may_have_a_step_or_be_named() -> None:
    batch = {"x": X, "names": ["a", "b", "c", "d"]}
    assert rows_of(batch, slice(1, None, 2), 4)["names"] == ["b", "d"]
    assert rows_of(batch, torch.tensor([3, 0]), 4)["names"] == ["d", "a"]


def test_a_pair_of_two_rows_is_a_pair() -> None:
    pair = [torch.arange(2), torch.arange(2) + 5]
    assert count_rows(pair) == 2
    first, second = rows_of(pair, slice(1, 2), 2)
    assert (first.item(), second.item()) == (1, 6)


def test_parts_of_other_shapes_that_have_the_rows_are_no_rows() -> None:
    batch = {"x": torch.zeros(2, 3), "parts": [torch.zeros(2, 4), torch.zeros(2, 5)]}
    assert [len(part) for part in rows_of(batch, slice(0, 1), 2)["parts"]] == [1, 1]


@pytest.mark.parametrize(
    "value", [[torch.zeros(2, 4), torch.ones(2, 4)], Strange(2)], ids=["tensors", "object"]
)
def test_what_may_be_rows_or_not_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match=r"batch\['value'\].*split_batch="):
        rows_of({"x": torch.zeros(2, 3), "value": value}, slice(0, 1), 2)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    ],
)
def test_values_of_sparse_and_nested_tensors_are_found_and_their_rows_refused(
    tensor: Tensor,
) -> None:
    assert float(sum(part.sum() for part in strided([tensor]) if part.is_floating_point())) == 3
    with pytest.raises(DataError, match="split_batch="):
        rows_of({"x": tensor}, slice(0, 1), 3)


def test_a_single_row_goes_whole() -> None:
    batch = {"x": torch.zeros(1, 3), "names": ["a"], "value": Strange(1)}
    assert rows_of(batch, slice(0, 1), count_rows(batch))["names"] == ["a"]


@pytest.mark.parametrize(
    "batch",
    [{"x": torch.zeros(4, 2), "y": torch.zeros(3)}, {"x": torch.tensor(1)}, ["a", "b"]],
    ids=str,
)
def test_batches_without_a_number_of_rows_are_refused(batch: Any) -> None:
    with pytest.raises(DataError, match="split_batch="):
        count_rows(batch)


def test_what_has_no_dimensions_goes_whole() -> None:
    batch = {"x": X, "scale": torch.tensor(3), "none": None}
    assert count_rows(batch) == 4
    part = rows_of(batch, LAST, 4)
    assert part["x"].tolist() == [2, 3] and part["scale"].item() == 3


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.arange(8.0).view(4, 2), "y": torch.arange(4.0), "weights": torch.ones(3)},
        (torch.arange(8.0).view(4, 2), torch.ones(3), torch.arange(4.0), torch.tensor(1.0)),
    ],
    ids=["dict", "tuple"],
)
def test_a_refusal_names_the_entries_and_the_line_to_write(batch: Any) -> None:
    with pytest.raises(DataError, match=r"batch\[.*\] \(4, 2\).* \(3,\)") as refused:
        count_rows(batch)
    split = eval(str(refused.value).rpartition("split_batch=")[2])
    parts = list(split(batch, 2))
    keys = list(batch) if isinstance(batch, dict) else range(len(batch))
    assert len(parts) == 2
    for key in keys:
        shape = tuple(batch[key].shape)
        assert [tuple(part[key].shape) for part in parts] == [
            (2, *shape[1:]) if shape[:1] == (4,) else shape
        ] * 2


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 8, 2),
        [torch.zeros(3, 8, 2), torch.zeros(3, 8)],
        {"x": torch.zeros(3, 8, 2), "y": torch.zeros(3, 8)},
    ],
    ids=["tensor", "list", "dict"],
)
def test_samples_in_dimension_1_are_refused_with_the_line_that_splits_them(batch: Any) -> None:
    with pytest.raises(DataError, match=r"8 samples.*3 in dimension 0") as refused:
        require_rows_first(batch, 3, 8)
    for part in eval(str(refused.value).rpartition("split_batch=")[2])(batch, 2):
        assert {tensor.shape[:2] for tensor in tensors_of(part)} == {(3, 4)}


@pytest.mark.parametrize(("rows", "samples"), [(8, 8), (4, 1), (16, 8)])
def test_other_numbers_of_rows_than_samples_may_be_rows(rows: int, samples: int) -> None:
    require_rows_first({"x": torch.zeros(rows, samples, 2), "y": torch.zeros(rows)}, rows, samples)
