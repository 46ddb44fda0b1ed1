"""Contract tests for what stands in for Lightning where it is not imported."""

import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from command_line import environment
from lightning.fabric.utilities import move_data_to_device as lightnings
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import rank_zero as lightnings_rank_zero
from parity import quiet_trainer
from torch import nn

from lightning_3d.compat import rank_zero
from lightning_3d.compat.batches import move_data_to_device
from lightning_3d.compat.lightning_loops import lightning_version, loops_after
from lightning_3d.compat.lightning_modules import (
    attributes_of_library,
    is_lightning_module,
    runs_alone,
)


def test_warnings_are_those_of_lightning() -> None:
    for name in ("rank_zero_warn", "rank_zero_info", "rank_zero_only"):
        assert getattr(rank_zero, name) is getattr(lightnings_rank_zero, name)


class Moves:
    """Has a method `to` of its own, which returns nothing."""

    def to(self, device: torch.device) -> None:
        self.device = device


def test_batches_move_as_in_lightning() -> None:
    batch = {"rows": [torch.ones(2), (torch.zeros(1), "text")], "own": Moves(), "kind": Moves}
    for move in (lightnings, move_data_to_device):
        moved = move(batch, "meta")
        assert (
            moved["rows"][0].is_meta
            and moved["rows"][1][0].is_meta
            and moved["rows"][1][1] == "text"
        )
        assert moved["own"].device == torch.device("meta") and moved["kind"] is Moves


def test_lightning_modules_are_known() -> None:
    class Runs(pl.LightningModule):
        def forward(self, x: object) -> object:
            return x

    assert is_lightning_module(Runs()) and not is_lightning_module(nn.Linear(1, 1))
    assert (
        runs_alone(Runs()) and not runs_alone(pl.LightningModule()) and not runs_alone(nn.Module())
    )
    assert set(vars(nn.Module())) < attributes_of_library()


def test_a_trainer_goes_on_after_steps_that_it_has_not_taken(tmp_path: Path) -> None:
    module = BoringModel()
    steps = {
        "optimizer_states": [module.configure_optimizers()[0][0].state_dict()],
        "lr_schedulers": [{}],
        "callbacks": {},
    }
    checkpoint = {
        "epoch": 0,
        "global_step": 3,
        "pytorch-lightning_version": lightning_version(),
        "loops": loops_after(3),
    }
    torch.save({**checkpoint, **steps, "state_dict": module.state_dict()}, tmp_path / "made.ckpt")
    trainer = quiet_trainer(max_steps=5, limit_val_batches=0)
    trainer.fit(BoringModel(), ckpt_path=str(tmp_path / "made.ckpt"))
    assert trainer.global_step == 5 and trainer.fit_loop.batch_idx == 1


@pytest.mark.slow
def test_an_engine_does_not_import_lightning() -> None:
    code = (
        "import sys; from lightning_3d import Engine; assert 'lightning' not in sys.modules and"
        " 'hydra' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment(), check=True, timeout=200
    )
