"""Ranks that compute more slowly than their peers."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data

from lightning_3d.app.runs.metrics_file import read_rows
from lightning_3d.app.training.callbacks import MetricsCSV
from lightning_3d.health.slow_ranks import WINDOW, SlowRanks
from lightning_3d.layout import Layout
from lightning_3d.parallel.expert.dispatch import DispatchedExperts


def test_f47_rank_that_is_slow_for_long_enough_is_named_once() -> None:
    ranks = SlowRanks([(0, 1, 2, 3), (4,)], 1.25, 3 * WINDOW, ["a", "a", "b", "b", "c"])
    named: list[tuple[int, int, str, float]] = []
    for window in range(20):
        slow = {2: 1.5 if 4 <= window < 12 or window in (15, 16) else 1.2}
        slowest, report = ranks.judge({rank: slow.get(rank, 1.0) for rank in range(4)} | {4: 9.0})
        assert slowest is not None and slowest.rank == 2
        named += [(window, one.rank, one.host, one.factor) for one in report]
    assert named == [(6, 2, "b", 1.5)]


def test_noise_is_no_alarm() -> None:
    noise = random.Random(0)
    ranks = SlowRanks([tuple(range(8))], 1.25, 50, [""] * 8)
    assert not any(
        ranks.judge({rank: noise.gauss(1.0, 0.15) for rank in range(8)})[1] for _ in range(1000)
    )


class Busy(torch.autograd.Function):
    """Takes time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(0.02)
        return gradient


class BusyExperts:
    """Mixin for experts with much work."""

    def forward(self, *arguments: Any) -> torch.Tensor:
        return Busy.apply(super().forward(*arguments))  # type: ignore[misc]


class Slow(pl.Callback):
    """Makes a rank slow: it sleeps in its forward, or another thread stops the process again and
    again."""

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
        elif self.how == "experts":
            for one in module.modules():
                # then comes their own class, whose forward multiplies
                if isinstance(one, DispatchedExperts):
                    one.__class__ = type(
                        "Experts", (DispatchedExperts, BusyExperts, type(one).__mro__[2]), {}
                    )
        elif self.how == "stops" and os.fork() == 0:
            parent = os.getppid()
            while not self.over:
                # some of each step
                for number, seconds in ((signal.SIGSTOP, 0.02), (signal.SIGCONT, 0.01)):
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


class TakesText(DummyLogger):
    """A logger that takes texts, too."""

    takes_text = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:  # type: ignore[override]
        self.seen |= metrics


class OnlyNumbers(TakesText):
    takes_text = False


def fit(
    layout: str,
    steps: int,
    how: str = "",
    rank: int = 1,
    *,
    model: str = "llama",
    path: str = "",
    **reliability: Any,
) -> tuple[list[str], Any, list[dict[str, Any]]]:
    """(warnings about slow ranks, the slowest rank of the last window, what loggers got) on this
    rank."""
    from lightning_3d.strategy import Lightning3DStrategy

    recipe = Recipe(model, 4, steps=steps, global_batch=8)
    strategy = Lightning3DStrategy(layout, micro_batch_size=2, reliability=reliability)
    assert strategy.layout is not None
    loggers: list[TakesText] = [TakesText(), OnlyNumbers()] if path else []
    callbacks = [*([Slow(rank, how)] if how else []), *([MetricsCSV(path)] if path else [])]
    quiet = {
        "max_epochs": 1,
        "callbacks": callbacks,
        "precision": "32-true",
        "logger": loggers,
        "log_every_n_steps": 1,
    }
    trainer = quiet_trainer(strategy=strategy, devices=strategy.layout.world_size, **quiet)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Module(recipe), datamodule=Data(Rows(data(recipe)), 8 // strategy.layout.dp))
    said = [str(one.message) for one in warned if str(one.message).startswith("Slow:")]
    return said, strategy._pace.slowest, [logger.seen for logger in loggers]  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sleeps", pytest.param("stops", marks=pytest.mark.full)])
def test_f47_slow_rank_is_named(how: str, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.csv"
    (said, slowest, seen), *_ = run_ranks(
        fit, 2, "dp2", 3 * WINDOW, how, 1, path=str(metrics), slow_rank_steps=2 * WINDOW
    )
    assert (slowest.rank, slowest.host) == (1, socket.gethostname()) and slowest.factor > 1.25
    assert len(said) == 1 and said[0].startswith(
        f"Slow: rank 1 ({socket.gethostname()}, cpu) takes "
    ), said
    assert (
        "times as long to compute as its peer with the same work (rank 0), for 20 steps" in said[0]
    )
    row = read_rows(metrics)[-1]
    assert (row["slow_rank"], row["slow_host"]) == ("1", socket.gethostname()) and float(
        row["slow_factor"]
    ) > 1.25
    assert [(one["step/slow_rank"], one.get("step/slow_host")) for one in seen] == [
        (1.0, socket.gethostname()),
        (1.0, None),
    ]


@pytest.mark.slow
def test_f47_rank_whose_experts_have_more_tokens_is_not_slow() -> None:
    """Of experts that are sharded over ranks, some have more work in each step than others."""
    # counted, its experts would make it five times as slow
    limits = {"slow_rank_steps": WINDOW, "slow_rank_factor": 2.5}
    (said, slowest, _), *_ = run_ranks(
        fit, 2, "dp2_ep2", WINDOW, "experts", 1, model="mixtral", **limits
    )
    assert slowest.factor < 2.5 and said == [], (slowest, said)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["tp2", "dp4", "tp2_pp2", "pp2_dp2"])
def test_f47_no_false_alarm(layout: str) -> None:
    for _ in range(10):
        for said, *_ in run_ranks(
            fit, Layout.parse(layout).world_size, layout, 12 * WINDOW, timeout=300
        ):
            assert said == []
