"""A step that is not finite is computed again, and the first layer that is not finite is named."""

from __future__ import annotations

import math
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default

from lightning_3d.errors import NonFiniteError
from lightning_3d.layout import Layout

BATCH, STEPS = 8, 3


class Overflow(pl.Callback):
    """Multiplies the output of a layer, or its gradient, by infinity, in one micro-batch of the
    second step of one data-parallel rank."""

    def __init__(self, layer: str, data_rank: int, *, backward: bool, once: bool) -> None:
        self.layer, self.data_rank, self.backward, self.once = layer, data_rank, backward, once
        self.done = False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        found = [child for name, child in module.named_modules() if name.endswith(self.layer)]
        if strategy.mesh.index("dp") != self.data_rank:
            return
        heartbeat = strategy.heartbeat

        def spoil(layer: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            if trainer.global_step != 1 or self.done or heartbeat.action[2] != 1:
                return output
            self.done = self.once
            if not self.backward:
                return output * math.inf
            if output.requires_grad:
                output.register_hook(lambda gradient: gradient * math.inf)
            return output

        for layer in found:
            layer.register_forward_hook(spoil)


def fit(layout: str, how: str, spoiler: dict[str, Any], **options: Any) -> tuple[str, list[str]]:
    """(text of the error, warnings) on this rank."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe("llama", 4, steps=STEPS, global_batch=BATCH)
    strategy = Lightning3DStrategy(layout, micro_batch_size=2, nonfinite=how, **options)
    assert strategy.layout is not None
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        max_epochs=1,
        callbacks=[Overflow(**spoiler)],
        precision="32-true",
    )
    rows = Rows(data(recipe))
    error = ""
    with pytest.warns() as warned:
        import warnings

        warnings.warn("one", stacklevel=1)
        try:
            trainer.fit(Module(recipe), datamodule=Data(rows, BATCH // strategy.layout.dp))
        except NonFiniteError as raised:
            error = str(raised)
    return error, [str(one.message) for one in warned if "Step " in str(one.message)]


LAYOUTS = [
    ("tp2_pp2", {}),
    ("dp2", {"zero_stage": 3, "zero_gather": "micro_batch"}),
    ("pp2_dp2", {"schedule": "ZBVZeroBubble"}),
    ("dp2", {"recompute": "full", "zero_stage": 2}),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("layout", "options"), by_default(LAYOUTS, 0, 1), ids=str)
def test_f41_first_layer_is_named(layout: str, options: dict[str, Any], backward: bool) -> None:
    dp = Layout.parse(layout).dp
    spoiler = {
        "layer": "layers.2.mlp.down_proj",
        "data_rank": dp - 1,
        "backward": backward,
        "once": False,
    }
    results = run_ranks(fit, Layout.parse(layout).world_size, layout, "stop", spoiler, **options)
    assert len({error for error, _ in results}) == 1
    what = "gradient of the output" if backward else "output"
    said = (
        rf"The first that is not finite is the {what} of model\.model\.layers\.2\.mlp\.down_proj"
        r" \(rank \d, stage \d, micro-batch 1:"
    )
    said += (
        rf" rows 2 to 3 of the batch of data-parallel rank {dp - 1}\)\. The optimizer did not take"
    )
    assert re.search(said, results[0][0]), results[0][0]


def test_f41_what_is_finite_the_second_time_is_wrong_arithmetic() -> None:
    spoiler = {"layer": "layers.2.mlp.down_proj", "data_rank": 0, "backward": False, "once": True}
    [(error, _), _] = run_ranks(fit, 2, "pp2", "stop", spoiler)
    assert (
        "Computed again from the same numbers, the step is finite: look for a device that computes"
        " wrongly" in error
    )


def test_f41_a_skipped_step_is_named_too() -> None:
    spoiler = {"layer": "layers.0.mlp.down_proj", "data_rank": 0, "backward": False, "once": False}
    (error, warned), _ = run_ranks(fit, 2, "pp2", "skip", spoiler)
    assert error == "" and len(warned) == 1
    assert (
        "layers.0.mlp.down_proj" in warned[0]
        and "The optimizer skips this step (skipped so far: 1)." in warned[0]
    )
