"""bf16 parameters with float32 master weights and sums of gradients, over many steps, against the
same on one process."""

from typing import Any

import pytest
import torch
from counting import when_a_gradient_arrives
from master_weights import RECIPE, train_with_masters
from parity import Module, Rows, fit_on_rank, train_on_rank
from ranks import run_ranks
from reference import Recipe, Run, data

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
    parts = run_ranks(
        train_on_rank, ranks, RECIPE, layout=layout, micro_batch_size=2, **strategy, timeout=180
    )
    losses = parts[0].losses
    assert all(part.losses == losses for part in parts)
    errors = [(loss - true) / true for loss, true in zip(losses, expected.losses, strict=True)]
    assert max(map(abs, errors)) < 2e-2
    assert abs(sum(errors[-20:]) / 20) < 2e-3, "the losses drift apart"
    assert parts[0].grad_norms == pytest.approx(expected.grad_norms, rel=5e-2)
    assert losses[-1] < losses[0]


class Arriving(Module):
    """Counts the parameters that have a 16-bit gradient when autograd has added one."""

    most = 0

    def on_train_batch_start(self, *_: Any) -> None:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        self.hooks = [
            when_a_gradient_arrives(parameter, lambda: self._count(parameters))
            for parameter in parameters
        ]

    def _count(self, parameters: list[torch.nn.Parameter]) -> None:
        self.most = max(self.most, sum(parameter.grad is not None for parameter in parameters))


def most_gradients(**strategy: Any) -> int:
    recipe = Recipe(steps=1, dtype="bfloat16")
    module = Arriving(recipe)
    fit_on_rank(recipe, Rows(data(recipe)), module, micro_batch_size=2, **strategy)
    return module.most


@pytest.mark.slow
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), 3])
def test_gradients_are_added_to_their_sums_as_they_arrive(stage: int) -> None:
    """A 16-bit gradient is gone before the next parameter's arrives: none is left when the hooks of
    this test run."""
    assert run_ranks(most_gradients, 4, layout="pp2_dp2", zero_stage=stage) == [0, 0, 0, 0]
