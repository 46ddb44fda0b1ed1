"""Ranks that compute more slowly than their peers."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data

from lightning_3d.health.slow_ranks import WINDOW, SlowRanks
from lightning_3d.layout import Layout


def test_f47_rank_that_is_slow_for_long_enough_is_named_once() -> None:
    ranks = SlowRanks([(0, 1, 2, 3), (4,)], 1.25, 3 * WINDOW)
    named: list[tuple[int, int, float]] = []
    for window in range(20):
        slow = {2: 1.5 if 4 <= window < 12 or window in (15, 16) else 1.2}
        slowest, report = ranks.judge({rank: slow.get(rank, 1.0) for rank in range(4)} | {4: 9.0})
        assert slowest is not None and slowest.rank == 2
        named += [(window, one.rank, one.factor) for one in report]
    assert named == [(6, 2, 1.5)]


def test_noise_is_no_alarm() -> None:
    noise = random.Random(0)
    ranks = SlowRanks([tuple(range(8))], 1.25, 50)
    assert not any(ranks.judge({rank: noise.gauss(1.0, 0.15) for rank in range(8)})[1] for _ in range(1000))


class Slow(pl.Callback):
    """Makes a rank slow: it sleeps in its forward, or another thread stops the process again and again."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how, self.over = rank, how, False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.how == "sleeps":
            forward = module.training_step

            def slow(*args: Any) -> Any:
                time.sleep(0.03)
                return forward(*args)

            module.training_step = slow  # type: ignore[method-assign]
        elif self.how == "stops" and os.fork() == 0:
            parent = os.getppid()
            while not self.over:
                for number, seconds in ((signal.SIGSTOP, 0.12), (signal.SIGCONT, 0.05)):
                    try:
                        os.kill(parent, number)
                    except ProcessLookupError:
                        os._exit(0)
                    time.sleep(seconds)
                if time.monotonic() > self.until:
                    os._exit(0)

    @property
    def until(self) -> float:
        return START + 60


START = time.monotonic()


def fit(layout: str, steps: int, how: str = "", rank: int = 1, **reliability: Any) -> tuple[list[str], Any]:
    """(warnings about slow ranks, the slowest rank of the last window) on this rank."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe("llama", 4, steps=steps, global_batch=8)
    strategy = Lightning3DStrategy(layout, micro_batch_size=2, reliability=reliability)
    assert strategy.layout is not None
    slow = [Slow(rank, how)] if how else []
    trainer = quiet_trainer(strategy=strategy, devices=strategy.layout.world_size, max_epochs=1, callbacks=slow, precision="32-true")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Module(recipe), datamodule=Data(Rows(data(recipe)), 8 // strategy.layout.dp))
    return [str(one.message) for one in warned if str(one.message).startswith("Slow:")], strategy._pace.slowest  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["sleeps", pytest.param("stops", marks=pytest.mark.full)])
def test_f47_slow_rank_is_named(how: str) -> None:
    (said, slowest), *_ = run_ranks(fit, 2, "dp2", 3 * WINDOW, how, 1, slow_rank_steps=2 * WINDOW)
    assert slowest.rank == 1 and slowest.factor > 1.25
    assert len(said) == 1 and said[0].startswith("Slow: rank 1 ("), said
    assert "times as long to compute as its peer with the same work (rank 0), for 20 steps" in said[0]


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "dp4", "tp2_pp2", "pp2_dp2"])
def test_f47_no_false_alarm(layout: str) -> None:
    for _ in range(10):
        for said, _ in run_ranks(fit, Layout.parse(layout).world_size, layout, 12 * WINDOW, timeout=300):
            assert said == []
