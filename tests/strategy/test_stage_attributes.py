"""What steps leave in attributes after the model's call is the same on every stage, at the end of
an epoch, as on one process."""

import threading
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.layout import Layout
from lightning_3d.strategy import Lightning3DStrategy

PLAN = {"pp": {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])}}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.leave(x)


class Meter:
    """A user's own average."""

    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0

    def update(self, value: Tensor, rows: int) -> None:
        self.total += float(value) * rows
        self.rows += rows


class Collects(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = Network()
        self.found: list[list[float]] = []
        self.lock: Any = None

    def _begin(self) -> None:
        self.losses: list[Tensor] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.counts = np.zeros(2)
        self.meter = Meter()
        self.by_name: dict[str, float] = {}

    def _collect(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        out = self.network(x)
        loss = F.mse_loss(out, y)
        self.losses.append(loss.detach())
        self.pairs.append((out.detach(), y))
        self.counts += [len(x), 1]
        self.meter.update(loss.detach(), len(x))
        self.by_name["rows"] = self.by_name.get("rows", 0.0) + len(x)
        self.lock = threading.Lock()
        return loss

    def _end(self) -> None:
        errors = torch.cat([out - y for out, y in self.pairs])
        rows = self.by_name["rows"]
        self.found.append(
            [
                torch.stack(self.losses).mean().item(),
                errors.norm().item(),
                self.counts[0],
                self.meter.total / rows,
                rows,
            ]
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._collect(batch)

    def on_validation_epoch_start(self) -> None:
        self._begin()

    def on_validation_epoch_end(self) -> None:
        self._end()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def epochs(strategy: Any, devices: int, validates: bool) -> list[list[float]]:
    module = Collects().double()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=8)
    trainer = quiet_trainer(strategy=strategy, devices=devices, max_epochs=2, precision="64-true")
    if validates:
        trainer.validate(module, loader, verbose=False)
    else:
        trainer.fit(module, loader, loader)
    return module.found


def in_layout(layout: str, options: dict[str, Any], validates: bool) -> list[list[float]]:
    strategy = Lightning3DStrategy(layout, plan=PLAN, self_check="never", **options)
    return epochs(strategy, Layout.parse(layout).world_size, validates)


@pytest.mark.parametrize("validates", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 4},
        pytest.param({"micro_batch_size": 2, "schedule": "ZBVZeroBubble"}, marks=pytest.mark.slow),
    ],
)
def test_every_stage_has_them(options: dict[str, Any], validates: bool) -> None:
    expected = epochs("auto", 1, validates)
    for found in run_ranks(in_layout, 2, "pp2", options, validates, process_group=False):
        assert len(found) == len(expected) > 0
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-9)
