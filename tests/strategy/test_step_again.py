"""A step computed again, before the optimizer steps, gives the same bits and leaves no trace."""

from typing import Any

import lightning.pytorch as pl
import models
import pytest
import torch
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data
from sweeps import by_default
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_3d.layout import Layout

STEPS, BATCH = 3, 8

CELLS: list[tuple[str, dict[str, Any]]] = [
    ("tp2_pp2", {}),
    ("dp2", {"zero_stage": 2, "zero_reduce": "micro_batch", "accumulate": 2}),
    ("dp2", {"zero_stage": 3, "zero_gather": "micro_batch"}),
    ("dp2_ep2", {"model": "deepseek_v3", "moe_bias_update": 0.01}),
    ("dp2", {"accumulate": 2}),
    ("pp2", {"schedule": "ZBVZeroBubble", "zero_stage": 2}),
    ("cp2", {}),
    ("tp2", {"recompute": "full", "precision": "bf16-true"}),
]


class Noisy(Module):
    """Draws random numbers of its own, logs, updates a metric, writes into a buffer, and takes
    apart its batch."""

    def __init__(self, recipe: Recipe, pops: bool) -> None:
        super().__init__(recipe)
        self.pops = pops
        self.register_buffer("calls", torch.zeros(()))
        self.metric = MeanMetric()

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        self.calls: Tensor
        self.calls += 1
        loss = super().training_step(
            {"labels": batch.pop("labels"), **batch} if self.pops else batch, batch_idx
        )
        assert isinstance(loss, Tensor)
        self.log("mean", loss, on_step=False, on_epoch=True)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss * (1 + torch.rand(())) * (1 + self.calls / 100)


class Again(pl.Callback):
    """Computes each step again `times` times, and compares the bits."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.compared = 0

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.strategy.built.repeatable.wanted = self.times > 0  # type: ignore[attr-defined]

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        built = trainer.strategy.built  # type: ignore[attr-defined]
        first = [gradient.clone() for gradient in built.backend.reduced_gradients()]
        totals = built.runner.totals
        for _ in range(self.times):
            assert built.repeatable.can_repeat
            computed = built.repeatable.again()
            assert computed.totals == totals
            again = list(built.backend.reduced_gradients())
            assert len(first) == len(again) and all(
                torch.equal(a, b) for a, b in zip(first, again, strict=True)
            )
            self.compared += 1


def state_of(strategy: Any) -> dict[str, Tensor]:
    """Copies of this rank's weights, buffers and of what its optimizer keeps."""
    shards = [*strategy.built.backend.weight_shards(), *strategy.built.backend.optimizer_shards()]
    state = {
        f"{s.name} {key} {s.start}": torch.as_tensor(value).clone()
        for s in shards
        for key, value in s.values.items()
    }
    module = strategy.lightning_module
    whole = dict(module.named_buffers()) if strategy.zero.stage == 3 else module.state_dict()
    return state | {name: value.detach().clone() for name, value in whole.items()}


def train(
    layout: str,
    times: int,
    model: str = "llama",
    accumulate: int = 1,
    precision: str = "32-true",
    **options: Any,
) -> Any:
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(model, 4, steps=STEPS, global_batch=BATCH)
    # the loss depends on earlier calls
    strategy = Lightning3DStrategy(layout, micro_batch_size=1, self_check="never", **options)
    assert strategy.layout is not None
    callback = Again(times)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=strategy.layout.world_size,
        precision=precision,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
    )
    pl.seed_everything(0)
    module = Noisy(recipe, pops="schedule" not in options)
    trainer.fit(
        module, datamodule=Data(Rows(data(recipe)), BATCH // strategy.layout.dp // accumulate)
    )
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return state_of(strategy), logged, callback.compared, torch.rand(()).item()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "options"), by_default(CELLS, 0, 1, 2), ids=str)
def test_a_step_computed_again_has_the_same_bits_and_leaves_no_trace(
    layout: str, options: dict[str, Any]
) -> None:
    world = Layout.parse(layout).world_size
    plain = run_ranks(train, world, layout, 0, **options)
    again = run_ranks(train, world, layout, 2, **options)
    for one, other in zip(plain, again, strict=True):
        assert other[2] == 2 * STEPS and one[1:2] == other[1:2] and one[3] == other[3]
        assert one[1].keys() >= {"mean", "metric"}
        assert one[0].keys() == other[0].keys()
        assert not [
            name for name, value in one[0].items() if not torch.equal(value, other[0][name])
        ]
