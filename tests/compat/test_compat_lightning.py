"""Contract tests for what `lightning_compat` uses of Lightning's callbacks."""

import warnings
from collections.abc import Callable
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ModelCheckpoint, ThroughputMonitor
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from parity import quiet_trainer
from torch.utils.data import DataLoader

from lightning_3d.compat.lightning import (
    complete_outputs,
    find_last_at_urls,
    has_outputs,
    hush_tree_warning,
    logging_in_training_step,
    throughputs_of,
)
from lightning_3d.compat.lightning_uses import reporting_uses


def test_uses_are_reported_inside_the_context_only() -> None:
    module, told = pl.LightningModule(), []
    module.trainer = quiet_trainer()
    for _ in range(2):  # the class is changed once
        with reporting_uses(module, told.append):
            assert module.logger is None and module.loggers == []
            module.print()
            pl.LightningModule().loggers  # noqa: B018 (another module)
    assert module.logger is None and module.loggers == []
    module.print()
    assert told == 2 * ["logger", "logger", "print"]


def test_the_outputs_of_a_closure_can_be_completed_until_they_are_taken() -> None:
    closure = Closure(lambda: ClosureResult(torch.tensor(1.5)))
    assert has_outputs(closure) and not has_outputs(lambda: None)
    closure()
    complete_outputs(closure, {"loss": torch.tensor(9.0), "accuracy": 0.5})
    assert closure.consume_result().asdict() == {"loss": torch.tensor(1.5), "accuracy": 0.5}


def test_another_hook_logs_as_training_step() -> None:
    module = pl.LightningModule()
    module._current_fx_name = "optimizer_step"
    with logging_in_training_step(module):
        assert module._current_fx_name == "training_step"
    assert module._current_fx_name == "optimizer_step"


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch warns of it since 2.13")
def test_lightning_uses_a_name_that_torch_deprecates() -> None:
    """If it does not, `hush_tree_warning` can go."""

    def said(change: Callable[[], None]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            change()
            next(iter(CombinedLoader(DataLoader([1, 2]), "max_size_cycle")))  # type: ignore[arg-type]
        return [str(warning.message) for warning in caught if "LeafSpec" in str(warning.message)]

    assert len(said(lambda: None)) == 1 and said(hush_tree_warning) == []


def test_a_throughput_monitor_has_a_counter_for_each_stage() -> None:
    monitor = ThroughputMonitor(len)
    trainer: Any = quiet_trainer()
    trainer.state.stage = RunningStage.TRAINING
    monitor.setup(trainer, pl.LightningModule(), "fit")
    [counter] = throughputs_of(monitor)
    assert isinstance(counter, Throughput)
    counter.update(time=1.0, batches=1, samples=1)
    assert monitor._throughputs[RunningStage.TRAINING].compute()["samples"] == 1


def test_lightning_forgets_the_protocol_of_what_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it remembers, `find_last_at_urls` can go."""
    find = ModelCheckpoint._find_last_checkpoints
    monkeypatch.setattr(ModelCheckpoint, "_find_last_checkpoints", getattr(find, "at_urls", find))
    system = fsspec.filesystem("memory")
    system.pipe_file("/contract/last.ckpt/manifest.json", b'{"global_step": 1}')
    callback, trainer = ModelCheckpoint("memory://contract", save_last=True), quiet_trainer()
    assert callback._find_last_checkpoints(trainer) == {"/contract/last.ckpt"}
    find_last_at_urls()
    assert callback._find_last_checkpoints(trainer) == {"memory://contract/last.ckpt/manifest.json"}
    system.rm("/contract", recursive=True)
