"""A model that computes its activations a second time in the backward, by its own `gradient_checkpointing_enable`."""

import math
from typing import Any

import pytest
from parity import Module, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, reference

RECIPE = Recipe()


class Recomputing(Module):
    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        self.model.gradient_checkpointing_enable()  # type: ignore[operator]
        self.ran = [0]
        for layer in self.model.model.layers:  # type: ignore[union-attr]
            layer.mlp.register_forward_pre_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.ran[0] += 1


def train(**strategy: Any) -> tuple[Part, int]:
    """The run, and how often the layers of this rank ran in each micro-batch of a step."""
    module = Recomputing(RECIPE)
    part = fit_on_rank(RECIPE, Rows(data(RECIPE)), module, **strategy)
    return part, module.ran[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"layout": "dp2", "zero_stage": 3},
        {"layout": "pp2_dp2", "zero_stage": 3},
        pytest.param({"layout": "tp2_dp2", "zero_stage": 3, "zero_reduce": "step"}, marks=pytest.mark.full),
        {"layout": "pp2_dp2", "schedule": "ZBVZeroBubble", "zero_stage": 2},
    ],
    ids=lambda strategy: "-".join(map(str, strategy.values())),
)
def test_recomputation_changes_nothing(strategy: dict[str, Any]) -> None:
    degrees = {part[:2]: int(part[2:]) for part in strategy["layout"].split("_")}
    results = run_ranks(train, math.prod(degrees.values()), micro_batch_size=2, **strategy)
    assert_same_run([part for part, _ in results], reference(RECIPE)[0])
    layers = RECIPE.layers // degrees.get("pp", 1)
    once = RECIPE.steps * layers * RECIPE.global_batch // degrees["dp"] // 2
    assert all(ran >= 2 * once for _, ran in results)
