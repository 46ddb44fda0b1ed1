"""Layers to stages: against all possible splits."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.errors import LayoutError
from lightning_3d.layout.balance import split_layers

small = st.integers(0, 6)


def every_split(layers: int, stages: int) -> list[list[range]]:
    cuts = combinations(range(1, layers), stages - 1)
    return [[range(a, b) for a, b in zip((0, *cut), (*cut, layers), strict=True)] for cut in cuts]


def largest(costs: list[int], split: list[range], first: int, last: int) -> int:
    stages = [sum(costs[layer] for layer in stage) for stage in split]
    stages[0] += first
    stages[-1] += last
    return max(stages)


@st.composite
def models(draw):
    layers = draw(st.integers(1, 8))
    flops, params = (draw(st.lists(small, min_size=layers, max_size=layers)) for _ in range(2))
    return (
        flops,
        params,
        draw(st.integers(1, layers)),
        draw(st.tuples(small, small)),
        draw(st.tuples(small, small)),
    )


@pytest.mark.slow
@given(models())
@settings(max_examples=300)
def test_no_split_has_smaller_flops_then_smaller_parameters(model):
    flops, params, stages, first, last = model

    def key(split: list[range]) -> tuple[int, int]:
        return largest(flops, split, first[0], last[0]), largest(params, split, first[1], last[1])

    found = split_layers(flops, params, stages, first_extra=first, last_extra=last)
    assert found in every_split(len(flops), stages)
    assert key(found) == min(map(key, every_split(len(flops), stages)))


@given(st.integers(1, 40), st.integers(1, 10))
def test_equal_layers_are_dealt_evenly_and_later_stages_get_more(layers: int, stages: int):
    stages = min(stages, layers)
    sizes = [len(stage) for stage in split_layers([1.0] * layers, [1.0] * layers, stages)]
    assert sizes == [layers // stages] * (stages - layers % stages) + [layers // stages + 1] * (
        layers % stages
    )


def test_f05_layers_that_stages_do_not_divide_are_dealt_unevenly():
    assert split_layers([1] * 7, [1] * 7, 4) == [range(1), range(1, 3), range(3, 5), range(5, 7)]


def test_a_head_takes_layers_from_the_last_stage_and_an_embedding_from_the_first():
    with_head = split_layers([10] * 10, [10] * 10, 2, last_extra=(40, 40))
    assert [len(stage) for stage in with_head] == [7, 3]
    with_embedding = split_layers([1] * 9, [1] * 9, 2, first_extra=(0, 100))
    assert [len(stage) for stage in with_embedding] == [4, 5]


def test_f05_fewer_layers_than_stages():
    with pytest.raises(
        LayoutError, match="3 layers cannot be assigned to 4 pipeline stages.*at most 3 stages"
    ):
        split_layers([1] * 3, [1] * 3, 4)
    with pytest.raises(LayoutError, match="0 pipeline stages"):
        split_layers([1] * 3, [1] * 3, 0)


def test_costs_must_be_of_the_same_layers():
    with pytest.raises(ValueError, match="got 3 and 2 entries"):
        split_layers([1] * 3, [1] * 2, 1)
