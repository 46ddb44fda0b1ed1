"""Contract tests for what `lightning_compat` uses of Lightning's callbacks."""

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage
from parity import quiet_trainer

from lightning_3d.lightning_compat import throughputs_of


def test_a_throughput_monitor_has_a_counter_for_each_stage() -> None:
    monitor = ThroughputMonitor(len)
    trainer: Any = quiet_trainer()
    trainer.state.stage = RunningStage.TRAINING
    monitor.setup(trainer, pl.LightningModule(), "fit")
    [counter] = throughputs_of(monitor)
    assert isinstance(counter, Throughput)
    counter.update(time=1.0, batches=1, samples=1)
    assert monitor._throughputs[RunningStage.TRAINING].compute()["samples"] == 1
