"""What a run does when its loss jumps: on all ranks alike, and the same numbers as without the jump
where it should."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data

from lightning_3d.layout import Layout

BATCH, STEPS, JUMP = 4, 26, 23


class Jumps(pl.Callback):
    """Adds to the output of the last block in one step: once, as wrong arithmetic does, or always,
    as data does."""

    def __init__(self, size: float, *, once: bool) -> None:
        self.size, self.once = size, once
        self.losses: list[float] = []
        self.skipped: list[int] = []

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        [layer] = [child for name, child in module.named_modules() if name.endswith("model.norm")]
        done: list[int] = []

        def spoil(layer: torch.nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
            if trainer.global_step != JUMP or (self.once and done):
                return output
            done.append(1)
            return output + self.size * torch.arange(output.shape[-1], dtype=output.dtype).cos()

        layer.register_forward_hook(spoil)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        step: Any = trainer.strategy.last_step  # type: ignore[attr-defined]
        self.losses.append(step.loss)
        if step.skipped:
            self.skipped.append(trainer.global_step)


def fit(layout: str, how: str, size: float, once: bool) -> tuple[list[float], list[int], list[str]]:
    """(losses, skipped steps, warnings) on this rank."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe("llama", 2, steps=STEPS, global_batch=BATCH)
    strategy = Lightning3DStrategy(
        layout, micro_batch_size=1, reliability={"loss_spikes": how, "loss_spike_score": 20.0}
    )
    assert strategy.layout is not None
    jumps = Jumps(size, once=once)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        max_epochs=1,
        callbacks=[jumps],
        precision="64-true",
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(
            Module(recipe), datamodule=Data(Rows(data(recipe)), BATCH // strategy.layout.dp)
        )
    return (
        jumps.losses,
        jumps.skipped,
        [str(one.message) for one in warned if "the loss jumps" in str(one.message)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", pytest.param("tp2_dp2", marks=pytest.mark.full)])
def test_f42_jumps_are_told_apart(layout: str) -> None:
    world_size = Layout.parse(layout).world_size
    clean, _, none = run_ranks(fit, world_size, layout, "report", 0.0, once=False)[0]
    assert none == []
    for how, once in (("report", False), ("skip", False), ("rerun", False), ("rerun", True)):
        results = run_ranks(fit, world_size, layout, how, 50.0, once=once)
        assert len({(tuple(losses), tuple(skipped)) for losses, skipped, _ in results}) == 1
        losses, skipped, [warned] = results[0]
        assert warned.startswith(f"Step {JUMP + 1}: the loss jumps to ")
        assert losses[:JUMP] == clean[:JUMP]
        if once:
            assert "the arithmetic was wrong the first time. The second result is used" in warned
            assert losses == clean
        else:
            assert losses[JUMP] > clean[JUMP] + 1
            assert skipped == ([JUMP + 1] if how == "skip" else [])
            assert ("it is the same to the last bit: look at the data" in warned) == (
                how == "rerun"
            )
