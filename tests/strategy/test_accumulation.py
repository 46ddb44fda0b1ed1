"""`accumulate_grad_batches`: several small batches are one step, as one large batch is, or as on
one process where they are not alike."""

import warnings
from typing import Any

import lightning.pytorch as pl
import models
import parity
import pytest
import torch
import torch.nn.functional as F
from counting import recording
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model
from sweeps import by_default
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dp2", {"micro_batch_size": 1}),
    ("tp2_pp2", {"micro_batch_size": 1, "zero": 1}),
    (
        "pp2_dp2",
        {
            "micro_batch_size": 1,
            "schedule": "ZBVZeroBubble",
            "zero": 2,
            "zero_reduce": "micro_batch",
        },
    ),
    ("pp2_dp2", {"micro_batch_size": 1, "zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(("layout", "strategy"), by_default(LAYOUTS, 2, 3), ids=str)
def test_several_batches_are_one_step(
    layout: str, strategy: dict[str, Any], accumulate: int
) -> None:
    parity.assert_same_training("llama", layout, accumulate=accumulate, **strategy)


def reductions(accumulate: int, zero_stage: int) -> list[int]:
    """Elements that each batch sends over the data-parallel ranks in all-reduces."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(steps=4)
    strategy = Lightning3DStrategy("dp2", zero_stage=zero_stage)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=2,
        limit_train_batches=6,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
    )
    sent: list[int] = []
    step = strategy.training_step

    def recorded(*args: Any) -> Any:
        with recording() as recorder:
            result = step(*args)
        sent.append(sum(call.numel for call in recorder.calls if call.name == "all_reduce"))
        return result

    strategy.training_step = recorded  # type: ignore[method-assign]
    trainer.fit(Module(recipe), DataLoader(Rows(data(recipe)), batch_size=2))
    return sent


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_are_reduced_once_for_each_step(zero_stage: int) -> None:
    [every, _] = run_ranks(reductions, 2, 1, zero_stage)
    [third, _] = run_ranks(reductions, 2, 3, zero_stage)
    # the loss and checks of the data are small
    assert [sent < 100 for sent in third] == [True, True, False] * 2
    assert all(sent > 1000 for sent in every) and third[2] > 1000


# Batches that are not alike, and steps that an epoch ends early, against plain Lightning.

PLAN: Any = {"pp": {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Regression(pl.LightningModule):
    """Keeps the loss of each batch. `kind`: what the loss is, and what sees its gradients."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.net = kind, Net()
        self.seen: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        out = self.net(x)
        if self.kind == "clamped" and out.requires_grad:
            out.register_hook(lambda gradient: gradient.clamp(-0.05, 0.02))
        loss = F.l1_loss(out, y)
        if self.kind == "declared":
            weights = y.square()
            return {
                "loss": (weights * (out - y).abs()).sum() / weights.sum(),
                "loss_weight": weights.sum(),
            }
        return loss * len(x) if self.kind == "sum" else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.002 if self.kind == "sum" else 0.05)


class Text(Module):
    def __init__(self) -> None:
        super().__init__(RECIPE, initial_model(RECIPE))
        self.seen: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


RECIPE = Recipe(layers=2, steps=2)
REDUCTIONS = {"sum": "sum", "equal": "accumulate"}


def losses(kinds: list[str], layout: str = "") -> dict[str, tuple[list[float], list[str]]]:
    """(Losses of the batches of three epochs, warnings about weights) by kind; without a layout in
    plain Lightning."""
    from lightning_3d.strategy import Lightning3DStrategy

    found = {}
    for kind in kinds:
        options: dict[str, Any] = {"devices": 1, "strategy": "auto"}
        dp = 1
        if layout:
            more = {} if "text" in kind else {"plan": PLAN, "loss_reduction": REDUCTIONS.get(kind)}
            strategy = Lightning3DStrategy(layout, micro_batch_size=1, **more)
            assert strategy.layout is not None
            dp = strategy.layout.dp
            options = {"devices": strategy.layout.world_size, "strategy": strategy}
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(21, 8, generator=generator)
        rows: Any = TensorDataset(x, x.sum(1, keepdim=True).sin())
        module: Any = Regression(kind)
        if "text" in kind:
            module, batch = Text(), cut(data(RECIPE), 0, 24)
            batch["labels"] = batch["input_ids"].clone()
            if kind == "padded text":
                batch["labels"][12:, :9] = models.IGNORE
            rows = Rows(batch)
        # Steps of two batches of three, then of one, then of four where there are three.
        schedule = GradientAccumulationScheduler({0: 2, 1: 1, 2: 4})
        trainer = quiet_trainer(max_epochs=3, callbacks=[schedule], **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(rows, batch_size=8 // dp))
        found[kind] = (
            module.seen,
            [
                str(warning.message)
                for warning in caught
                if "accumulate_grad_batches=" in str(warning.message)
            ],
        )
    return found


AS_ALONE = ["rows", "clamped", "sum", "equal", "text"]


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[float], list[str]]]:
    return run_ranks(losses, 1, AS_ALONE)[0]


@pytest.mark.parametrize("layout", ["pp2", "dp2", pytest.param("pp2_dp2", marks=pytest.mark.slow)])
def test_each_batch_weighs_as_in_plain_lightning(
    layout: str, alone: dict[str, tuple[list[float], list[str]]]
) -> None:
    for found in run_ranks(losses, 4 if layout == "pp2_dp2" else 2, AS_ALONE, layout):
        for kind in AS_ALONE:
            assert len(alone[kind][0]) == 9
            assert found[kind][0] == pytest.approx(alone[kind][0], rel=2e-5), kind
            assert not found[kind][1]


@pytest.mark.parametrize("kind", ["declared", "padded text"])
def test_weights_that_only_the_step_shows_are_reported_once(kind: str) -> None:
    parts = run_ranks(losses, 2, [kind], "dp2")
    assert [len(part[kind][1]) for part in parts] == [1, 0]
