"""A model that computes its activations a second time in the backward, by its own
`gradient_checkpointing_enable`."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from parity import Module, Part, Rows, assert_same_run, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, default_dtype, reference
from torch import Tensor, nn

from lightning_3d.compat.torch import compiled_graphs
from lightning_3d.options.blocks import BlockOptions
from lightning_3d.parallel.blocks import process_blocks

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
        pytest.param(
            {"layout": "tp2_dp2", "zero_stage": 3, "zero_reduce": "step"}, marks=pytest.mark.full
        ),
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


class Constants(nn.Module):
    """A block with constants of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.linear(x) * torch.tensor(0.5)).exp() * torch.ones(4)


def gradients(options: BlockOptions) -> list[Tensor]:
    """Those of two blocks whose forward has double precision as default type, as in Lightning, and
    whose backward has not."""
    torch.manual_seed(0)
    blocks = [Constants().double() for _ in range(2)]
    process_blocks(blocks, options, compiler=partial(torch.compile, backend="aot_eager"))
    with default_dtype(torch.float64):
        x = torch.linspace(0, 1, 8, requires_grad=True).view(2, 4)
        for block in blocks:
            x = block(x)
    x.sum().backward()
    return [
        parameter.grad
        for block in blocks
        for parameter in block.parameters()
        if parameter.grad is not None
    ]


@pytest.mark.parametrize(
    ("recompute", "compile"), [("full", True), ("full", False), ("selective", False)]
)
def test_a_forward_that_runs_again_has_the_default_type_of_the_first(
    recompute: str, compile: bool
) -> None:
    """So it computes the same, in the same graph."""
    torch._dynamo.reset()
    before = compiled_graphs()
    keep = ("mm",) if recompute == "selective" else None
    found = gradients(BlockOptions(recompute=recompute, recompute_keep=keep, compile=compile))
    assert compiled_graphs() - before == compile
    for value, expected in zip(found, gradients(BlockOptions()), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    assert torch.get_default_dtype() == torch.float32
