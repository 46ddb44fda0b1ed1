"""Layers whose weight is computed from other parameters are not sharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.tensor import refuse_computed_weights


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)


PLAN = {"tp": {"up": "colwise", "down": "rowwise"}}


@pytest.mark.parametrize(
    "change",
    [
        weight_norm,
        spectral_norm,
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        lambda layer: parametrize.register_parametrization(layer, "weight", Doubled()),
        lambda layer: parametrize.register_parametrization(layer, "bias", Doubled()),
    ],
)
def test_a_layer_with_a_computed_weight_is_refused_by_name(
    change: Callable[[nn.Module], Any],
) -> None:
    block = Block()
    refuse_computed_weights(block, read_plan(block, PLAN))
    change(block.down)
    with pytest.raises(PlanError, match="'down'"):
        refuse_computed_weights(block, read_plan(block, PLAN))


def test_a_layer_that_the_plan_leaves_out_may_compute_its_weight() -> None:
    block = Block()
    block.extra = weight_norm(nn.Linear(4, 4))
    refuse_computed_weights(block, read_plan(block, PLAN))
