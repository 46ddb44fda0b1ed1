"""Where the ranks of a Trainer of one's own listen, if all of them are on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from command_line import environment
from parity import Data, Module, Rows, quiet_trainer
from ranks import run_ranks
from reference import Recipe, data

from lightning_3d import Lightning3DStrategy
from lightning_3d.ranks import loopback
from lightning_3d.ranks.loopback import INTERFACE_VARIABLE, GlooInterface, share_loopback

SCRIPT = """
import os
from pathlib import Path
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_3d import Lightning3DStrategy

def listening():
    inodes = {os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists() or one.is_symlink()}
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, batch_idx):
        Path(f"rank{self.trainer.global_rank}").write_text(" ".join(listening()))
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=2, strategy=Lightning3DStrategy("dp2"), max_steps=2, default_root_dir=".", **quiet)
trainer.fit(Module(), DataLoader(torch.ones(40, 8), batch_size=4))
assert "GLOO_SOCKET_IFNAME" not in os.environ
"""  # noqa: E501
LOOPBACK = "0100007F"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if launcher == "torchrun"
        else []
    )
    command = [sys.executable, *torchrun, "script.py"]
    values = {name: value for name, value in environment().items() if name != INTERFACE_VARIABLE}
    done = subprocess.run(
        command, cwd=tmp_path, env=values, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [set((tmp_path / f"rank{rank}").read_text().split()) for rank in range(2)]
    assert found == [{LOOPBACK}, {LOOPBACK}]


class Interface(pl.Callback):
    """The interface of gloo in a fit, where the layers may still make groups."""

    during: str | None = None

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.during = os.environ.get(INTERFACE_VARIABLE)


def fit() -> tuple[str | None, str | None]:
    """(interface of gloo in a fit, and after it)."""
    os.environ.pop(INTERFACE_VARIABLE, None)
    recipe, seen = Recipe("llama", 4, steps=1, global_batch=4), Interface()
    trainer = quiet_trainer(
        strategy=Lightning3DStrategy("dp2"),
        devices=2,
        max_steps=1,
        callbacks=[seen],
        precision="32-true",
    )
    trainer.fit(Module(recipe), datamodule=Data(Rows(data(recipe)), 2))
    return seen.during, os.environ.get(INTERFACE_VARIABLE)


@pytest.mark.skipif(sys.platform != "linux", reason="network namespaces")
def test_gloo_uses_the_loopback_interface_in_a_fit_on_one_machine() -> None:
    assert run_ranks(fit, 2, process_group=False) == [("lo", None), ("lo", None)]


class Store(dict[str, str]):
    def wait(self, keys: list[str], patience: timedelta) -> None:
        assert all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str, default: object = None) -> str:  # type: ignore[override]
        return self[key]


def test_ranks_in_other_network_namespaces_do_not_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    store.set("lightning_3d/network/0", loopback._loopback())
    assert share_loopback(store, 1, 2, 1.0)
    store.set("lightning_3d/network/0", "another boot net:[4026531833]")
    assert not share_loopback(store, 1, 2, 1.0)
    monkeypatch.setattr(loopback, "_loopback", lambda: "")  # on no rank can it be used
    store.set("lightning_3d/network/0", "none on rank 0")
    assert not share_loopback(store, 1, 2, 1.0)


def test_the_choice_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setenv(INTERFACE_VARIABLE, "ib0")
    interface = GlooInterface()
    interface.choose_loopback()
    interface.restore()
    assert os.environ[INTERFACE_VARIABLE] == "ib0"
    monkeypatch.delenv(INTERFACE_VARIABLE)
    interface.choose_loopback()
    assert os.environ[INTERFACE_VARIABLE] == "lo"
    interface.restore()
    assert INTERFACE_VARIABLE not in os.environ
