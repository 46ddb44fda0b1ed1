"""Fewer data-parallel ranks give the same numbers, even where rows that share a micro-batch depend
on each other."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from own_gpt import GPT, PLAN, Text
from parity import Module, StepValues, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

GLOBAL_BATCH, MICRO_BATCH = 24, 2


def fit(layout: str, elastic: str | bool, family: str | None, **options: Any) -> list[float]:
    """Losses of two epochs of a loader that shuffles: of a small GPT with dropout, or of a mixture
    of experts with a router loss."""
    pl.seed_everything(5, verbose=False)
    strategy = Lightning3DStrategy(layout, micro_batch_size=MICRO_BATCH, elastic=elastic, **options)
    assert strategy.layout is not None
    values = StepValues()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        max_epochs=2,
        precision="64-true",
        callbacks=[values],
    )
    rows: Any = TensorDataset(
        torch.randint(16, (2 * GLOBAL_BATCH, 8), generator=torch.Generator().manual_seed(0))
    )
    module: pl.LightningModule = Text(GPT(dropout=0.2))
    if family is not None:
        recipe = Recipe(family, layers=2, steps=2, global_batch=GLOBAL_BATCH, dtype="float64")
        batch = data(recipe)
        rows = [
            {key: value[row] for key, value in batch.items()} for row in range(2 * GLOBAL_BATCH)
        ]
        module = Module(recipe)
    trainer.fit(
        module, DataLoader(rows, batch_size=GLOBAL_BATCH // strategy.layout.dp, shuffle=True)
    )
    routers = [
        loss for step in values.routers if step is not None for loss in (step.aux_loss, step.z_loss)
    ]
    return values.losses + values.grad_norms + routers


def losses(
    layout: str, elastic: str | bool, family: str | None = None, **options: Any
) -> list[float]:
    return run_ranks(fit, Layout.parse(layout).world_size, layout, elastic, family, **options)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "smaller", "family", "options"),
    [
        ("dp3", ["dp2"], None, {}),
        ("dp3", ["dp2"], "mixtral", {"moe_aux_loss": 0.1, "moe_z_loss": 0.01}),
        pytest.param("dp4", ["dp3", "dp2", "tp1"], None, {}, marks=pytest.mark.full),
        pytest.param("tp2_dp2", ["tp2"], None, {"plan": PLAN}, marks=pytest.mark.full),
        pytest.param(
            "pp2_dp3", ["pp2_dp2", "pp2"], "mixtral", {"moe_aux_loss": 0.1}, marks=pytest.mark.full
        ),
        pytest.param(
            "ep2_dp4",
            ["ep2_dp2"],
            "deepseek_v3",
            {"moe_aux_loss": 0.1, "moe_bias_update": 0.01},
            marks=pytest.mark.full,
        ),
    ],
)
def test_f48_dropout_and_router_losses_are_those_of_the_whole_layout(
    whole: str, smaller: list[str], family: str | None, options: dict[str, Any]
) -> None:
    expected = losses(whole, False, family, **options)
    for layout in smaller:
        assert losses(layout, whole, family, **options) == pytest.approx(expected, rel=1e-9), layout
    assert losses(smaller[-1], False, family, **options) != pytest.approx(expected, rel=1e-6), (
        "this does not test anything"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"elastic": True, "micro_batch_size": 2},
            "elastic must be the name of a layout that differs from dp2 in dp only; got True",
        ),
        (
            {"elastic": "tp2_dp4", "micro_batch_size": 2},
            "differs from dp2 in dp only; got 'tp2_dp4'",
        ),
        ({"elastic": "dp4"}, "elastic needs a layout and a micro_batch_size"),
    ],
)
def test_other_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lightning3DStrategy("dp2", **options)
