"""Differences between records of ranks and of one process, made by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_3d.app.verification.advice import (
    COUNTED,
    NOT_A_NUMBER,
    OPTIMIZED,
    PARTS,
    ROWS,
    VALUES,
    WRITTEN,
    kind_of,
)
from lightning_3d.app.verification.differences import (
    BUFFERS,
    LOGGED,
    LOSS,
    NORM,
    OPTIMIZER,
    START,
    STEPS,
    WEIGHTS,
    Comparison,
    compare,
)
from lightning_3d.parallel.sharding import cut_along
from lightning_3d.strategy.recorded.records import Piece, Records, State, merged, rows_in

FACTS = {"loaders": 1, "rows": 4, "places": [[0, 1, 2, 3]], "precision": "32-true"}
WHOLE = torch.arange(12.0).reshape(4, 3)


def state(weight: Tensor, start: int | None = None) -> State:
    average = Piece(start, {"exp_avg": weight * 0.1, "step": 1.0})
    return State(
        {"w": Piece(start, {"weight": weight.clone()})},
        {"w": average},
        {"seen": torch.ones(2)},
        {"accuracy": 0.5},
    )


def run_of(weight: Tensor, start: int | None = None, steps: int = 2) -> Records:
    return Records(
        batches=[torch.zeros(4, 2)] * steps,
        samples=[[0, 1, 2, 3]] * steps,
        losses=[1.0] * steps,
        norms=[2.0] * steps,
        states=[state(weight, start) for _ in range(steps + 1)],
    )


def ranks() -> list[Records]:
    """Two tensor-parallel ranks; the second one keeps a range of the flattened shard, as ZeRO
    does."""
    found = []
    for rank in range(2):
        spec = cut_along("w", (4, 3), 0, [(2 * rank, 2)], tp_replicas=(rank,))
        local = spec.cut(WHOLE)
        records = run_of(local) if rank == 0 else run_of(local.flatten()[2:], 2)
        records.specs = {"w": spec}
        if rank > 0:
            records.batches = []
        found.append(records)
    return found


def compared(
    change: Callable[[list[Records]], None], nudge: Callable[[Records], None] = lambda one: None
) -> Comparison:
    ours, one = ranks(), run_of(WHOLE)
    nudged = copy.deepcopy(one)
    change(ours)
    nudge(nudged)
    return compare(ours, one, nudged, FACTS)


def test_shards_of_the_same_are_the_same() -> None:
    found = compared(lambda ours: None)
    assert found.same and found.weight == found.loss == found.grad_norm == 0
    assert set(found.largest) == {START, LOSS, NORM, LOGGED, WEIGHTS, BUFFERS, OPTIMIZER}
    assert "optimizer state" in str(found)


def weights(ours: list[Records]) -> None:
    ours[1].states[2].weights["w"].values["weight"][3] += 0.01  # type: ignore[index, operator]


def start(ours: list[Records]) -> None:
    ours[0].states[0].weights["w"].values["weight"][0, 1] += 0.01  # type: ignore[index, operator]


def loss(ours: list[Records]) -> None:
    ours[0].losses[1] = ours[1].losses[1] = 1.1


def norm(ours: list[Records]) -> None:
    ours[1].norms[0] = float("nan")


def logged(ours: list[Records]) -> None:
    ours[1].states[1].logged["accuracy"] = 0.6


def buffers(ours: list[Records]) -> None:
    ours[0].states[1].buffers["seen"][1] = 3.0


def optimizer(ours: list[Records]) -> None:
    ours[0].states[1].optimizer["w"].values["step"] = 2.0


def average(ours: list[Records]) -> None:
    ours[0].states[1].optimizer["w"].values["exp_avg"][0, 0] += 1.0  # type: ignore[index, operator]


def steps(ours: list[Records]) -> None:
    for one in ours:
        del one.losses[1:], one.norms[1:], one.states[2:]


@pytest.mark.parametrize(
    ("change", "what", "step", "rank", "numbers", "kind"),
    [
        (weights, WEIGHTS, 2, 1, (11.01, 11.0), WRITTEN),
        (start, START, 0, 0, (1.01, 1.0), None),
        (loss, LOSS, 2, None, (1.1, 1.0), PARTS),
        (norm, NORM, 1, 1, None, NOT_A_NUMBER),
        (logged, LOGGED, 1, 1, (0.6, 0.5), VALUES),
        (buffers, BUFFERS, 1, 0, (3.0, 1.0), COUNTED),
        (optimizer, OPTIMIZER, 1, 0, (2.0, 1.0), OPTIMIZED),
        (average, OPTIMIZER, 1, 0, (1.0, 0.0), WRITTEN),
        (steps, STEPS, 2, None, (1.0, 2.0), None),
    ],
)
def test_each_value_is_found(
    change: Callable[[list[Records]], None],
    what: str,
    step: int,
    rank: int | None,
    numbers: tuple[float, float] | None,
    kind: str | None,
) -> None:
    found = compared(change)
    assert not found.same
    first = found.found[0]
    assert (first.what, first.step, first.rank) == (what, step, rank)
    if numbers is not None:
        assert (first.ours, first.theirs) == pytest.approx(numbers)
    if kind is not None:
        assert kind_of(found, Comparison(), None) == kind


def test_a_loss_that_differs_on_one_rank_too_is_no_mean_over_rows() -> None:
    found = compared(loss)
    assert kind_of(found, found, Comparison()) == ROWS
    assert kind_of(found, Comparison(), None) == PARTS


def test_some_times_the_noise_is_allowed() -> None:
    def nudge(one: Records) -> None:
        one.states[1].weights["w"].values["weight"][3, 2] += 0.0011  # type: ignore[index, operator]

    assert compared(weights, nudge).same, "the noise of earlier steps counts"
    assert not compared(start, nudge).same


def test_single_weights_may_differ_more_where_there_is_noise() -> None:
    def spread(ours: list[Records]) -> None:
        for one in ours:
            for each in one.states[1:]:
                weight = each.weights["w"].values["weight"]
                assert isinstance(weight, Tensor)
                weight.flatten()[: 1 + weight.numel() // 4] += 0.1

    def single(ours: list[Records]) -> None:
        ours[0].states[2].weights["w"].values["weight"][0, 0] += 0.1  # type: ignore[index, operator]

    def nudge(one: Records) -> None:
        one.states[1].weights["w"].values["weight"][3, 2] += 0.001  # type: ignore[index, operator]

    assert compared(single, nudge).same
    assert not compared(single).same
    assert not compared(spread, nudge).same


def test_values_that_one_process_does_not_repeat_are_not_judged() -> None:
    def nudge(one: Records) -> None:
        one.states[1].logged["accuracy"] = 0.9

    assert compared(logged, nudge).same


def test_batches_of_ranks_are_joined_in_the_order_of_one_process() -> None:
    whole = {
        "x": torch.arange(6.0)[:, None],
        "names": list("abcdef"),
        "scale": torch.tensor(2.0),
        "how": "mean",
    }
    parts = [
        {**whole, "x": whole["x"][rank::2], "names": whole["names"][rank::2]} for rank in range(2)
    ]  # type: ignore[index]
    found = merged(parts, [[0, 2, 4], [1, 3, 5]])
    assert torch.equal(found["x"], whole["x"]) and found["names"] == whole["names"]  # type: ignore[arg-type]
    assert found["how"] == "mean" and float(found["scale"]) == 2.0
    assert rows_in(whole) is None and rows_in(whole["x"]) == 6


def test_ranks_that_read_the_same_rows_are_found() -> None:
    ours, one = ranks(), run_of(WHOLE)
    ours[1].batches, ours[1].data_index = ours[0].batches, 1
    one.batches = [torch.arange(8.0).reshape(4, 2)] * 2
    found = compare(ours, one, one, FACTS)
    assert found.misread is not None and "same rows" in found.misread and not found.same
