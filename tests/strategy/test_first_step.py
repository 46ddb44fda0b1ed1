"""What the user's code raises in the first step of a layout ends in one message; errors on one
process, and later, stay as they are."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from command_line import environment
from parity import quiet_trainer
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.strategy import Lightning3DStrategy

PLAN = {
    "tp": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
    "pp": {"enter": (["x"], ["h"]), "blocks": (["h"], ["h"]), "leave": (["h"], ["y"])},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Module(pl.LightningModule):
    """A module with one mistake, or one line that needs the whole model or all rows."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.net, self.what = Net(), what
        self.first = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.steps, self.mean, self.scale = 0, 1.0, None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.what == "step":
            raise KeyError("no such thing")
        if self.what == "counter":
            self.steps += 1
        if self.what == "cached" and self.scale is None:
            self.scale = torch.ones(1)
        self.out = out = self.net(batch[0] * self.mean)
        if self.what == "average":
            self.mean = 0.9 * self.mean
        if self.what == "rows":
            out = out * torch.ones(8, 1)
        assert self.out is not None
        return mse_loss(out, batch[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.what == "later" and batch_idx == 1:
            raise KeyError("later")

    def on_train_batch_end(self, *args: Any) -> None:
        if self.what == "weights":
            with torch.no_grad():
                for parameter, first in zip(self.net.parameters(), self.first, strict=True):
                    parameter.data = first + parameter
        if self.what == "alone" and self.trainer.global_rank == 1:
            raise ArithmeticError("only here")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.what == "optimizer":
            raise TypeError("no optimizer")
        if self.what == "file":
            Path("no_such_file").read_text()
        return torch.optim.SGD(self.parameters(), 0.1)


class Told(Lightning3DStrategy):
    """A strategy that keeps what it would show."""

    told: BaseException | None = None

    def _explained(self, exception: BaseException) -> BaseException:
        self.told = super()._explained(exception)
        return self.told


def fails(layout: str, kinds: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """Type and text of what is shown, and the type of what the script gets, of each kind."""
    found = []
    for what, more in kinds:
        torch.manual_seed(0)
        strategy = Told(layout, plan=PLAN, **{"self_check": "never", **more})
        assert strategy.layout is not None
        trainer = quiet_trainer(strategy=strategy, devices=strategy.layout.world_size, max_steps=2)
        data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
        try:
            trainer.fit(Module(what), DataLoader(data, batch_size=8))
        except Exception as error:
            told = strategy.told
            assert told is not None and error in (told, told.__cause__)
            found.append((type(told).__name__, str(told), type(error).__name__))
    return found


@pytest.mark.parametrize(
    ("layout", "what", "says"),
    [("pp2", "optimizer", "pp = 2"), ("tp2", "step", "(8, 8) here, and (16, 8)")],
)
def test_code_of_the_user_is_explained_on_every_rank(layout: str, what: str, says: str) -> None:
    for ((kind, text, raised),) in run_ranks(fails, 2, layout, [(what, {})], timeout=120):
        assert kind == "FirstStepError" and "test_first_step.py:" in text and f"{raised}: " in text
        assert says in text and "devices=1" in text and "dp2" in text


def test_values_that_a_step_carries_to_its_next_call_are_refused() -> None:
    """The loss depends on an average that changes in every call; a counter alone, and a value that
    is kept, do not count."""
    split: dict[str, Any] = {"micro_batch_size": 4, "self_check": "auto"}
    kinds = [
        ("counter", split),
        ("average", split),
        ("cached", split),
        ("counter", {}),
        ("average", {**split, "self_check": "never"}),
    ]
    ((kind, text, _),) = run_ranks(fails, 1, "dp1", kinds, timeout=120)[0]
    assert kind == "ConfigError" and "self.mean" in text and "micro_batch_size=8" in text
    for shown in run_ranks(
        fails, 2, "pp2", [("counter", split), ("cached", split), ("average", split)], timeout=120
    ):
        ((kind, text, _),) = shown
        assert kind == "ConfigError" and "self.mean" in text and "on_train_batch_end" in text


def test_one_process_later_steps_and_files_are_left_alone() -> None:
    split = {"micro_batch_size": 4}
    kinds = [("step", {}), ("optimizer", {}), ("rows", split), ("later", split), ("file", split)]
    (shown,) = run_ranks(fails, 1, "dp1", kinds, timeout=120)
    assert [kind for kind, _, _ in shown] == [
        "KeyError",
        "TypeError",
        "FirstStepError",
        "KeyError",
        "FileNotFoundError",
    ]
    rows = shown[2][1]
    assert (
        "4 of the 8 rows" in rows
        and "batch[0] (4, 4)" in rows
        and "split_batch=" in rows
        and "micro_batch_size=8" in rows
    )


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from test_first_step import *

layout, what = sys.argv[1:]
torch.manual_seed(0)
strategy = Lightning3DStrategy(layout, plan=PLAN, self_check="never")
trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=2)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
trainer.fit(Module(what), DataLoader(data, batch_size=8))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "what", "says"),
    [("pp2", "weights", "pp = 2"), ("tp2", "step", "(8, 8)"), ("tp2", "alone", "only here")],
)
def test_a_script_ends_with_code_2_and_one_message(
    layout: str, what: str, says: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    shows = what == "alone"
    words = {**environment(), "LIGHTNING_3D_TRACEBACK": str(int(shows))}
    words["PYTHONPATH"] = (
        f"{words.get('PYTHONPATH', '')}:{Path(__file__).parent.parent / 'support'}"
    )
    done = subprocess.run(
        [sys.executable, str(script), layout, what],
        env=words,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("in the first step with") == 1 and says in done.stderr, done.stderr
    assert ("Traceback" in done.stderr) == shows
