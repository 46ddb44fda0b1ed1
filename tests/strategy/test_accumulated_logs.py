"""What the first batches of a step with `accumulate_grad_batches` have logged, as callbacks see it
at the end of each batch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import models
import pytest
import torch
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

ACCUMULATE, BATCHES, BATCH = 3, 7, 4
"""The last step has one batch only, because the epoch ends."""
EMPTY = (1, 3)
"""Batches in which no target counts: a second and a first one of their steps."""
NUMBERS = ("mean", "sum", "max", "min", "metric")


class Logs(Module):
    """Logs a number that each row has, in all ways."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.metric = MeanMetric()

    def training_step(self, batch: models.Batch, batch_idx: int) -> dict[str, Any]:
        value = batch["value"].mean()
        for how in ("mean", "sum", "max", "min"):
            self.log(how, value, on_step=True, on_epoch=True, reduce_fx=how)
        self.metric(value)
        self.log("metric", self.metric, on_step=True, on_epoch=True)
        self.log("shown", value, on_step=True, on_epoch=False)
        self.log("late", value, on_step=False, on_epoch=True)
        if batch_idx % 2 == 0:
            self.log("even", value, on_step=True, on_epoch=True)
        loss = super().training_step(
            {key: batch[key] for key in batch if key != "value"}, batch_idx
        )
        return {
            "loss": loss,
            "nested": {"value": value},
            "rows": torch.tensor(1),
            "word": "same",
            "all": batch["value"],
        }


@dataclass
class Seen:
    """What callbacks read: at the end of each batch (logged values, outputs, losses), and at the
    end of the epoch."""

    logged: list[dict[str, float]] = field(default_factory=list)
    returned: list[tuple[float, int, str]] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    steps: int = 0


class Sees(pl.Callback):
    def __init__(self) -> None:
        self.seen = Seen()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.logged.append(
            {name: float(value) for name, value in trainer.callback_metrics.items()}
        )
        assert (
            outputs["nested"]["value"].dtype == torch.float32
            and outputs["rows"].dtype == torch.int64
        )
        self.seen.returned.append(
            (float(outputs["nested"]["value"]), int(outputs["rows"]), outputs["word"])
        )
        self.seen.losses.append(
            (float(outputs["loss"]) * ACCUMULATE, trainer.strategy.last_step.loss)
        )


def rows() -> tuple[Rows, Tensor, Tensor]:
    """(rows, the number of each, how many targets it has)."""
    recipe = Recipe("llama", 2, steps=BATCHES, global_batch=BATCH)
    batch = data(recipe)
    for row in range(BATCHES * BATCH):
        batch["labels"][row, : 1 + row % 5] = models.IGNORE
        if row // BATCH in EMPTY:
            batch["labels"][row] = models.IGNORE
    counts = (batch["labels"][:, 1:] != models.IGNORE).sum(1).double()
    values = torch.sin(torch.arange(BATCHES * BATCH).double()) * 3
    return Rows(batch | {"value": values.float()}), values, counts


def fit(layout: str) -> Seen:
    """What callbacks see on this rank."""
    plan, sees = Lightning3DStrategy(layout, micro_batch_size=1, seed=0, self_check="never"), Sees()
    assert plan.layout is not None
    trainer = quiet_trainer(
        strategy=plan,
        devices=plan.layout.world_size,
        max_epochs=1,
        accumulate_grad_batches=ACCUMULATE,
        callbacks=[sees],
    )
    module = Logs(Recipe("llama", 2, steps=BATCHES, global_batch=BATCH))
    trainer.fit(module, datamodule=Data(rows()[0], BATCH // plan.layout.dp))
    sees.seen.ended, sees.seen.steps = (
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        trainer.global_step,
    )
    return sees.seen


def expected_steps() -> Iterator[dict[str, float]]:
    """What each batch shows, by the definition of each reduction; a batch without targets shows
    what the one before it did."""
    _, values, counts = rows()
    shown: dict[str, float] = {}
    for batch in range(BATCHES):
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        value, count = values[part][counts[part] > 0], counts[part][counts[part] > 0]
        if len(count):
            mean = float((value * count).sum() / count.sum())
            shown = {
                "mean": mean,
                "sum": float(value.sum()),
                "max": float(value.max()),
                "min": float(value.min()),
                "metric": mean,
            }
        yield shown


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_every_rank_sees_what_each_batch_has_logged(layout: str) -> None:
    _, values, counts = rows()
    counted = [
        slice(batch * BATCH, (batch + 1) * BATCH) for batch in range(BATCHES) if batch not in EMPTY
    ]
    mean = float((values * counts).sum() / counts.sum())
    even = torch.arange(BATCHES * BATCH) // BATCH % 2 == 0
    for seen in run_ranks(fit, 2, layout):
        ended = seen.ended
        assert seen.steps == 3 and len(seen.logged) == BATCHES
        for batch, (logged, shown) in enumerate(zip(seen.logged, expected_steps(), strict=True)):
            assert {name: logged[f"{name}_step"] for name in NUMBERS} == pytest.approx(
                shown, abs=1e-5
            ), batch
            assert logged["shown"] == logged["mean_step"] and "late" not in logged
        assert ended["mean_epoch"] == ended["late"] == pytest.approx(mean, abs=1e-5)
        assert ended["even_epoch"] == pytest.approx(
            float((values * counts)[even].sum() / counts[even].sum()), abs=1e-5
        )
        assert ended["sum_epoch"] == pytest.approx(
            float(sum(values[part][counts[part] > 0].sum() for part in counted)), abs=1e-4
        )
        assert ended["max_epoch"] == pytest.approx(float(values[counts > 0].max()), abs=1e-5)
        assert ended["min_epoch"] == pytest.approx(float(values[counts > 0].min()), abs=1e-5)
        assert ended["metric_epoch"] == pytest.approx(float(values.mean()), abs=1e-5), (
            "every update counts"
        )
        assert [math.isnan(loss) for loss, _ in seen.losses] == [
            batch in EMPTY for batch in range(BATCHES)
        ]
        assert all(loss == pytest.approx(read, rel=1e-6, nan_ok=True) for loss, read in seen.losses)


@pytest.mark.parametrize("layout", ["pp2", pytest.param("pp2_dp2", marks=pytest.mark.full)])
def test_every_rank_sees_the_numbers_that_each_batch_has_returned(layout: str) -> None:
    """On the last stage and before it: means weighted by targets, and sums of counts, of the rows
    of its own data-parallel rank."""
    _, values, counts = rows()
    size = Layout.parse(layout)
    for rank, seen in enumerate(run_ranks(fit, size.world_size, layout)):
        for batch, (value, number, word) in enumerate(seen.returned):
            part = slice(batch * BATCH + size.coordinates(rank)["dp"], (batch + 1) * BATCH, size.dp)
            weights = counts[part] if counts[part].any() else torch.ones_like(counts[part])
            assert value == pytest.approx(
                float((values[part] * weights).sum() / weights.sum()), abs=1e-6
            )
            assert (number, word) == (BATCH // size.dp, "same")


def log_other_names() -> None:
    class Names(Module):
        def training_step(self, batch: models.Batch, batch_idx: int) -> Any:
            self.log(f"of_rank_{self.global_rank}", 1.0)
            return super().training_step(batch, batch_idx)

    recipe = Recipe("llama", 2, steps=2, global_batch=4)
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy("dp2"), devices=2, max_epochs=1, accumulate_grad_batches=2
    )
    trainer.fit(Names(recipe), datamodule=Data(Rows(data(recipe)), 1))


def test_ranks_that_log_other_names_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="names passed to self.log in a step differ between data-parallel ranks"
    ):
        run_ranks(log_other_names, 2)
