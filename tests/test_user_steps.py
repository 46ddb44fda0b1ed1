"""Steps as people write them: other argument names, outputs beside the loss, metrics, a second Trainer, frozen parts."""

import warnings
from typing import Any

import lightning.pytorch as pl
import models
import parity
import pytest
import torch
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data, initial_model, target_count
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_3d.errors import ConfigError

ROWS, BATCH = 13, 4  # the last batches are short, and with two data ranks one row is repeated
RECIPE = Recipe(steps=2)


class Sees(pl.Callback):
    """What callbacks get as outputs."""

    def __init__(self) -> None:
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.trained.append({key: float(value) for key, value in outputs.items() if value.ndim == 0})

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.validated.append(float(outputs["val_loss"]))


class Steps(Module):
    """Names of its own, and more than a loss."""

    def training_step(self, batch: models.Batch, _: int) -> dict[str, Tensor]:
        assert self.model is not None
        out = self.model(**batch)
        return {"loss": out.loss, "largest": out.logits.max().detach(), "logits": out.logits.detach()}

    def validation_step(self, batch: models.Batch) -> dict[str, Tensor]:
        assert self.model is not None
        loss = self.model(**batch).loss
        self.log("val_loss", loss)
        return {"val_loss": loss}


class NumberedSteps(Steps):
    """An index under another name, and two loaders."""

    def validation_step(self, batch: models.Batch, i: int, dataloader_idx: int = 0) -> dict[str, Tensor]:  # type: ignore[override]
        return super().validation_step(batch)


def rows() -> Rows:
    """Some of the targets are left out, so that rows differ in weight."""
    batch = cut(data(RECIPE), 0, ROWS)
    for row in range(0, ROWS, 2):
        batch["labels"][row, : 2 + row] = models.IGNORE
    return Rows(batch)


def loss_of(batch: models.Batch) -> tuple[float, int]:
    """(mean loss, target tokens) on one process."""
    with torch.no_grad():
        return models.causal_token_losses(initial_model(RECIPE), batch).mean().item(), target_count("llama", batch)


def strategy_trainer(layout: str, callbacks: list[pl.Callback] | None = None, **strategy: Any) -> pl.Trainer:
    from lightning_3d.strategy import Lightning3DStrategy

    plan = Lightning3DStrategy(layout, **{"micro_batch_size": 1} | strategy)
    assert plan.layout is not None
    return quiet_trainer(strategy=plan, devices=plan.layout.world_size, max_epochs=1, callbacks=callbacks or [])


def validate(layout: str, numbered: bool) -> tuple[list[float], list[float]]:
    seen = Sees()
    loaders = [DataLoader(rows(), batch_size=BATCH) for _ in range(1 + numbered)]
    module = NumberedSteps(RECIPE) if numbered else Steps(RECIPE)
    found = strategy_trainer(layout, [seen]).validate(module, loaders if numbered else loaders[0], verbose=False)
    return [value for metrics in found for value in metrics.values()], seen.validated


@pytest.mark.parametrize("numbered", [False, True], ids=["no_index", "named_i"])
@pytest.mark.parametrize(("layout", "ranks"), [("pp2_dp2", 4), ("dp2", 2), ("pp2", 2)])
def test_steps_need_not_be_called_batch_idx(layout: str, ranks: int, numbered: bool) -> None:
    """A row that the sampler repeats counts once whether or not the step takes an index."""
    expected, _ = loss_of(rows().batch)
    for logged, _ in run_ranks(validate, ranks, layout, numbered):
        assert logged == pytest.approx([expected] * len(logged), rel=1e-5)
        assert len(logged) == 1 + numbered


def test_returned_numbers_are_weighted_as_the_loss_is() -> None:
    whole = rows().batch
    expected = [loss_of(cut(whole, start, BATCH))[0] for start in range(0, ROWS, BATCH)]
    for _, returned in run_ranks(validate, 2, "pp2", False):
        assert returned == pytest.approx(expected, rel=1e-5)


def train_with_extras(layout: str) -> list[dict[str, float]]:
    seen = Sees()
    strategy_trainer(layout, [seen]).fit(Steps(RECIPE), DataLoader(rows(), batch_size=BATCH))
    return seen.trained


def test_callbacks_of_every_rank_see_the_numbers_beside_the_loss() -> None:
    first, *others = run_ranks(train_with_extras, 4, "tp2_pp2")
    assert len(first) == 4 and all(set(step) == {"loss", "largest"} for step in first)
    for other in others:
        assert all(step == pytest.approx(expected) for step, expected in zip(other, first, strict=True))


class ComputesInside(Module):
    def __init__(self, recipe: Recipe, on_step: bool) -> None:
        super().__init__(recipe)
        self.mean = MeanMetric(dist_sync_on_step=on_step)
        self.on_step = on_step

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(**batch).loss
        self.mean(loss.detach())
        if not self.on_step:
            self.mean.compute()
        return loss


def fit(layout: str, kind: str, zero_stage: int = 0, **arguments: Any) -> int:
    """Steps taken."""
    module = {"inside": ComputesInside, "frozen": PartlyFrozen}[kind](RECIPE, **arguments)
    trainer = strategy_trainer(layout, zero_stage=zero_stage)
    trainer.fit(module, DataLoader(rows(), batch_size=BATCH))
    return trainer.global_step


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
@pytest.mark.parametrize("on_step", [False, True])
def test_a_metric_over_all_ranks_inside_a_step_is_refused(on_step: bool, layout: str) -> None:
    """Some ranks never get there: it would wait for ever."""
    with pytest.raises(ConfigError, match="inside a step"):
        run_ranks(fit, 2, layout, "inside", on_step=on_step)


class PartlyFrozen(Module):
    """Trains the last block and the head only."""

    def __init__(self, recipe: Recipe, filtered: bool) -> None:
        super().__init__(recipe)
        self.filtered = filtered

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("layers.3." in name or "lm_head" in name)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        chosen = [p for p in self.parameters() if p.requires_grad or not self.filtered]
        return torch.optim.AdamW(chosen, lr=1e-3)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_frozen_stage(zero: int) -> None:
    assert run_ranks(fit, 2, "pp2", "frozen", zero, filtered=False) == [4, 4]
    with pytest.raises(ConfigError, match=r"rank 0\. Give the optimizer self\.parameters\(\)"):
        run_ranks(fit, 2, "pp2", "frozen", zero, filtered=True)


def second_trainer(layout: str, second: str) -> tuple[list[float], str]:
    """Loss after a fit: validated by its own Trainer, by another one, and after a second fit by the other."""
    module, loader = Steps(RECIPE), DataLoader(rows(), batch_size=BATCH)
    first = strategy_trainer(layout)
    first.fit(module, loader)
    losses = [first.validate(module, loader, verbose=False)[0]["val_loss"]]
    try:
        other = strategy_trainer(second)
        losses.append(other.validate(module, loader, verbose=False)[0]["val_loss"])
        third = strategy_trainer(second, zero_stage=1)
        third.fit(module, loader)
        losses.append(third.validate(module, loader, verbose=False)[0]["val_loss"])
    except Exception as error:
        return losses, f"{type(error).__name__}: {error}"
    return losses, ""


def test_a_second_trainer_goes_on_with_the_module() -> None:
    first, *others = run_ranks(second_trainer, 4, "tp2_pp2", "tp2_pp2")
    assert all(other == first for other in others)
    losses, message = first
    assert message == "" and losses[0] == losses[1] > losses[2]


def test_a_second_trainer_with_another_layout_is_refused() -> None:
    for losses, message in run_ranks(second_trainer, 4, "tp2_pp2", "pp2_dp2"):
        assert len(losses) == 1
        assert message.startswith("ConfigError") and "tp2_pp2" in message and "pp2_dp2" in message


def warned(layout: str, micro_batch_size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = strategy_trainer(layout, micro_batch_size=micro_batch_size)
        trainer.fit(Steps(RECIPE), DataLoader(rows(), batch_size=BATCH, drop_last=True))
    return [str(warning.message) for warning in caught if "pipeline stages" in str(warning.message)]


def test_a_pipeline_that_idles_for_want_of_micro_batches_is_told_once() -> None:
    told, silent = run_ranks(warned, 2, "pp2", 4)
    assert len(told) == 1 and "1 micro-batch for 2 pipeline stages" in told[0] and silent == []
    assert run_ranks(warned, 2, "pp2", 1) == [[], []]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("layout", ["tp2_dp4", "tp4_pp1_dp2"])
def test_copies_stay_equal_where_the_vocabulary_is_cut_unevenly(layout: str, zero: int) -> None:
    """67 tokens: tensor-parallel ranks have flat buffers of different sizes, but hold the same norms bit by bit."""
    parity.assert_same_training("llama", layout, zero=zero)
