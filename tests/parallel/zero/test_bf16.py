"""bf16 parameters with float32 master weights and sums of gradients, over many steps, against the same on one process."""

from typing import Any

import pytest
import torch
from master_weights import RECIPE, train_with_masters
from parity import train_on_rank
from ranks import run_ranks
from reference import Run

LAYOUTS = [
    pytest.param("dp4", {}, marks=pytest.mark.full),
    pytest.param("tp2_pp2_dp2", {"zero_stage": 1}, marks=pytest.mark.full),
    ("pp2_dp2", {"zero_stage": 2, "zero_reduce": "micro_batch", "schedule": "ZBVZeroBubble"}),
    pytest.param("tp2_dp2", {"zero_stage": 3}, marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def expected() -> Run:
    return train_with_masters()


@pytest.mark.parametrize(("layout", "strategy"), LAYOUTS, ids=str)
def test_many_steps_stay_close(layout: str, strategy: dict[str, Any], expected: Run) -> None:
    degrees = [int(part[2:]) for part in layout.split("_")]
    ranks = torch.tensor(degrees).prod().item()
    parts = run_ranks(train_on_rank, ranks, RECIPE, layout=layout, micro_batch_size=2, **strategy, timeout=180)
    losses = parts[0].losses
    assert all(part.losses == losses for part in parts)
    errors = [(loss - true) / true for loss, true in zip(losses, expected.losses, strict=True)]
    assert max(map(abs, errors)) < 2e-2
    assert abs(sum(errors[-20:]) / 20) < 2e-3, "the losses drift apart"
    assert parts[0].grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)
    assert losses[-1] < losses[0]
