"""All tokens at two experts of eight, six without any: training is the one of one process, and what
happened is reported."""

from typing import Any
from unittest.mock import patch

import models
import parity
import pytest
import reference
import torch
from crowded_experts import HOT, Crowded, crowd
from parity import Rows, fit_on_rank
from ranks import run_ranks
from reference import Recipe, data, initial_model, split, train_on
from sweeps import by_default
from torch import nn

from lightning_3d.layout import Layout


def crowded_model(recipe: Recipe) -> nn.Module:
    model = initial_model(recipe)
    crowd(model)
    return model


def train_crowded(recipe: Recipe, **strategy: Any) -> parity.Part:
    return fit_on_rank(recipe, Rows(data(recipe)), Crowded(recipe), **strategy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "zero", "schedule"),
    by_default(
        [
            ("tp2_ep4_pp2_dp2", 0, "1F1B"),
            ("ep4_dp4", 3, "1F1B"),
            ("tp2_dp2", 0, "1F1B"),
            ("ep2_dp2", 0, "1F1B"),
            ("ep8_dp8", 1, "1F1B"),
            ("ep4_pp2_dp4", 2, "ZBVZeroBubble"),
            ("tp4_ep8_dp2", 1, "1F1B"),
            ("tp2_ep2_pp2_dp2", 3, "1F1B"),
        ],
        1,
    ),
)
def test_crowded_and_empty_experts_train(layout: str, zero: int, schedule: str) -> None:
    degrees = Layout.parse(layout)
    recipe = Recipe("deepseek_v3", dtype="float32" if zero else "float64", steps=6)
    micro_batch = recipe.global_batch // degrees.dp // (2 * degrees.pp)
    batches = [split(batch, 4) for batch in split(data(recipe), recipe.global_batch)]
    with patch.object(reference, "initial_model", crowded_model):
        expected = train_on(recipe, batches)
    how = {
        "layout": layout,
        "zero_stage": zero,
        "schedule": schedule,
        "micro_batch_size": max(micro_batch, 1),
    }
    parts = run_ranks(train_crowded, degrees.world_size, recipe, timeout=300, **how)
    parity.assert_same_run(parts, expected, recipe.dtype)
    tokens = recipe.global_batch * models.SEQUENCE
    counts = tuple(tokens if expert in HOT else 0 for expert in range(8))
    for part in parts:
        for step in part.routers:
            assert step.tokens == (counts,) * len(step.layers) and len(step.layers) == 3
            assert set(step.max_over_mean) == {4.0} and set(step.dropped) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("layout", by_default(["ep2_dp2", "tp2_pp2"], 0))
def test_what_a_crowded_expert_drops_is_counted(layout: str) -> None:
    """Each of two experts is asked by all tokens and has room for a quarter of them."""
    recipe = Recipe("deepseek_v3", dtype="float64", steps=3)
    ranks = Layout.parse(layout).world_size
    part = run_ranks(
        train_crowded, ranks, recipe, layout=layout, micro_batch_size=4, moe_capacity_factor=1.0
    )[0]
    assert all(step.dropped == (0.75,) * 3 for step in part.routers)
    assert torch.tensor(part.losses).isfinite().all()
