"""Ranks that compute on CPU use equally many threads: else their sums round differently, and
replicas drift apart.

Most tests run with one thread. A user's own script does not.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import environment
from lightning.pytorch import LightningModule, Trainer
from ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from lightning_3d import Lightning3DStrategy

SCRIPT = """
import os, sys
from test_cpu_threads import threads_after_fit
print(f"threads {threads_after_fit()}, {os.environ['OMP_NUM_THREADS']}\\n", end="", flush=True)
"""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Module(LightningModule):
    """Rows of numbers, as in the README: sequence parallelism cannot cut them, so the norm is
    computed on both tp ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Block(64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.network(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def threads_after_fit(own: int | None = None) -> int:
    """Train two tp ranks, which compare their replicas after each step. Returns the threads of this
    rank.

    Args:
        own: threads of this rank before the fit; None: as it was started.
    """
    if own is not None:
        torch.set_num_threads(own)
    plan = {"tp": {"up": "colwise", "down": "rowwise"}}
    strategy = Lightning3DStrategy(
        "tp2", plan=plan, self_check="never", reliability={"check_replicas_every_n_steps": 1}
    )
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=4, **quiet)
    torch.manual_seed(0)
    trainer.fit(Module(), DataLoader(torch.randn(256, 64), batch_size=64))
    return torch.get_num_threads()


def threads_of_rank(own: dict[int, int]) -> int:
    import os

    try:
        return threads_after_fit(own[int(os.environ["RANK"])])
    finally:
        torch.set_num_threads(1)


def test_ranks_use_the_smallest_number_of_threads_among_them() -> None:
    assert run_ranks(threads_of_rank, 2, {0: 3, 1: 2}, process_group=False) == [2, 2]


@pytest.mark.slow
def test_ranks_of_an_own_script_are_started_with_equally_many_threads(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = environment()
    del variables["OMP_NUM_THREADS"]
    variables["PYTHONPATH"] += f":{Path(__file__).parent}"
    command = [sys.executable, "-W", "ignore", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = re.findall(r"threads (\d+), (\d+)", done.stdout)
    assert first == second and first[0] == first[1], done.stdout
