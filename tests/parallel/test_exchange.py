"""Sums and gathers over gloo by one exchange, against arithmetic on one process."""

import pytest
import torch
from ranks import run_ranks
from sums_and_gathers import check, sums

from lightning_3d.parallel.gloo_exchange import SMALL


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_are_those_of_one_process(ranks: int) -> None:
    run_ranks(check, ranks, 5)


@pytest.mark.full
def test_large_tensors_too() -> None:
    run_ranks(check, 4, SMALL // 4)


def test_all_ranks_get_the_same_bits() -> None:
    (first, calls), *others = run_ranks(sums, 4)
    assert all(torch.equal(first, other) for other, _ in others)
    assert calls == ["all_reduce"]
