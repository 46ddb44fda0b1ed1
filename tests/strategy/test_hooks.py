"""Hooks of callbacks and of the module are called in the same order, and as often, as under
Lightning's DDPStrategy."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import DDPStrategy
from parity import Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, cut, data
from torch.utils.data import DataLoader

RECIPE = Recipe(steps=4)
# What callbacks and modules may define; the steps themselves are called once per micro-batch, so
# they are left out.
CALLBACK_HOOKS = sorted(
    name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
MODULE_HOOKS = sorted(
    name
    for name in dir(pl.LightningModule)
    if name.startswith("on_") and callable(getattr(pl.LightningModule, name)) and name != "on_gpu"
) + [
    "setup",
    "teardown",
    "configure_optimizers",
    "optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
]


class Recorder(pl.Callback):
    def __init__(self, calls: list[str]) -> None:
        for name in CALLBACK_HOOKS:
            setattr(self, name, self._recording(name, calls))

    @staticmethod
    def _recording(name: str, calls: list[str]) -> Callable[..., None]:
        def record(
            trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **kwargs: Any
        ) -> None:
            calls.append(
                f"callback.{name} {getattr(kwargs.get('stage'), 'value', kwargs.get('stage', ''))}"
            )

        return record


class Recorded(Module):
    def __init__(self, calls: list[str]) -> None:
        super().__init__(RECIPE)
        for name in MODULE_HOOKS:
            setattr(self, name, self._recording(name, getattr(self, name), calls))

    @staticmethod
    def _recording(name: str, hook: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"module.{name}")
            return hook(*args, **kwargs)

        return record

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.model is not None
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert self.model is not None
        return self.model(input_ids=batch["input_ids"]).logits

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        }


def calls(kind: str, accumulate: int) -> list[str]:
    """Fit with sanity check and validation, then validate, test and predict; `kind` is "one
    process", "ddp" or a layout."""
    from lightning_3d.strategy import Lightning3DStrategy

    arguments: dict[str, Any] = {}
    if kind != "one process":
        strategy = DDPStrategy() if kind == "ddp" else Lightning3DStrategy(kind, micro_batch_size=2)
        arguments = {"strategy": strategy, "devices": 2}
    recorded: list[str] = []
    trainer = quiet_trainer(
        **arguments,
        max_epochs=2,
        num_sanity_val_steps=1,
        val_check_interval=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        callbacks=[EarlyStopping("val_loss", patience=99), Recorder(recorded)],
    )
    module = Recorded(recorded)
    loader = DataLoader(Rows(cut(data(RECIPE), 0, 32)), batch_size=4)
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    trainer.predict(module, loader)
    return recorded


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_are_called_as_under_ddp(accumulate: int) -> None:
    [expected, _] = run_ranks(calls, 2, "ddp", accumulate)
    assert len(expected) > 200
    assert {
        "module.on_before_optimizer_step",
        "module.optimizer_step",
        "callback.on_after_backward ",
    } <= set(expected)
    for found in run_ranks(calls, 2, "dp2", accumulate):
        assert found == expected


@pytest.mark.slow
def test_a_pipeline_calls_them_as_one_process_does() -> None:
    [expected] = run_ranks(calls, 1, "one process", 1)
    for found in run_ranks(calls, 2, "pp2", 1):
        assert found == expected
