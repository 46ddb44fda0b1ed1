"""Where a Trainer with this strategy is made: a notebook, a Python prompt, `accelerate launch`,
torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import OUTSIDE, environment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_3d.errors import ConfigError
from lightning_3d.ranks.rendezvous import CHOSEN_VARIABLE
from lightning_3d.strategy import Lightning3DStrategy
from lightning_3d.strategy.refusals import refuse_surroundings

PLACE = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def made(layout: str, devices: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=Lightning3DStrategy(layout),
        logger=False,
        enable_checkpointing=False,
    )


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """What IPython and a Python prompt set, and what Lightning concludes from it when it is
    imported."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    for name in (*OUTSIDE, *PLACE, CHOSEN_VARIABLE):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


def test_several_ranks_in_a_notebook_are_refused_with_what_works(notebook: None) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"needs 2 ranks.*%%writefile mine.py.*!\S+ mine.py. With devices=1, the Trainer works"
            r" here"
        ),
    ):
        made("dp2", 2)


def test_one_rank_works_in_a_notebook_and_leaves_no_trace(
    notebook: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second Trainer with more devices must not take the process for a rank that something else
    started."""
    launcher: Any = made("tp1", 1).strategy.launcher
    assert launcher.launch(lambda: 7) == 7
    assert not {*PLACE} & os.environ.keys()
    with pytest.raises(ConfigError, match="needs 2 ranks"):
        made("dp2", 2)


def test_a_python_prompt_survives_a_refusal() -> None:
    lines = [
        "from lightning_3d.ranks.reporter import show_refusals_plainly",
        "from lightning_3d.errors import LayoutError",
        "show_refusals_plainly()",
        "raise LayoutError('this cannot be.')",
        "print('still', 'here')",
    ]
    done = subprocess.run(
        [sys.executable, "-i", "-q"],
        input="\n".join(lines) + "\n",
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        "still here" in done.stdout
        and "lightning_3d: this cannot be." in done.stderr
        and "Traceback" not in done.stderr
    )


def test_processes_that_accelerate_started_for_fsdp_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_surroundings({})
    refuse_surroundings({"ACCELERATE_USE_FSDP": "false"})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ConfigError, match="accelerate launch started this process for FSDP.*Use torchrun"
    ):
        made("tp1", 1)


# Several Trainers

TRAINERS = """
import sys
from lightning.pytorch import Trainer
from lightning_3d import Lightning3DStrategy
from lightning_3d.errors import ConfigError
from plain_module import LanguageModel, TextData
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
quiet.update(max_steps=1, limit_val_batches=0)
for devices in map(int, sys.argv[1:]):
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=Lightning3DStrategy(f"dp{devices}"), **quiet)
    try:
        trainer.fit(LanguageModel(), datamodule=TextData(8))
    except ConfigError as error:
        sys.exit(f"caught: {error}")
    sys.stdout.write(f"rank {trainer.global_rank} of {trainer.world_size}\\n")
"""  # noqa: E501


def trained(folder: Path, *devices: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(TRAINERS)
    command = [sys.executable, "-W", "ignore", "script.py", *devices]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.slow
def test_a_script_has_several_trainers(tmp_path: Path) -> None:
    done = trained(tmp_path, "1", "1", "2")
    assert re.findall(r"rank \d of \d", done.stdout) == ["rank 0 of 1"] * 2, done.stderr[-2000:]
    assert (
        done.returncode == 1
        and "caught: This Trainer needs 2 ranks, but an earlier Trainer of this script has 1."
        in done.stderr
    )


@pytest.mark.full
def test_a_script_has_several_trainers_with_two_ranks(tmp_path: Path) -> None:
    done = trained(tmp_path, "2", "2")
    assert (
        sorted(re.findall(r"rank \d of \d", done.stdout))
        == ["rank 0 of 2"] * 2 + ["rank 1 of 2"] * 2
    ), done.stderr[-2000:]
    assert done.returncode == 0
    done = trained(tmp_path, "2", "1")
    assert (
        done.returncode == 1
        and "This Trainer needs 1 rank, but an earlier Trainer of this script has 2." in done.stderr
    )


# Real launchers

SCRIPT = """
import sys
from lightning.pytorch import Trainer, seed_everything
from lightning_3d import Lightning3DStrategy
from plain_module import LanguageModel, TextData
layout, devices = sys.argv[1], int(sys.argv[2])
seed_everything(0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", devices=devices, strategy=Lightning3DStrategy(layout), max_steps=2, limit_val_batches=0, **quiet)
trainer.fit(LanguageModel(), datamodule=TextData(8))
sys.stdout.write(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.callback_metrics['train_loss_step']:.6f}\\n")
"""  # noqa: E501
ACCELERATE = ["-m", "accelerate.commands.accelerate_cli", "launch"]
LAUNCHERS = {
    "python": [],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    "accelerate, as torchrun": [*ACCELERATE, "--multi_gpu", "--num_processes", "2"],
    "accelerate, one process": [*ACCELERATE, "--cpu", "--num_processes", "1"],
}


def started(launcher: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", *LAUNCHERS[launcher], "script.py", *arguments]
    # no configuration of accelerate from the user's folder
    more = {"HF_HOME": str(folder), "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_launcher_trains_the_same(tmp_path: Path) -> None:
    found = {}
    for launcher in LAUNCHERS:
        done = started(launcher, tmp_path, "pp2", "2")
        assert done.returncode == 0, f"{launcher}: {done.stderr[-3000:]}"
        found[launcher] = sorted(re.findall(r"rank (\d) of 2: (\d+\.\d+)", done.stdout))
    (one,) = {tuple(ranks) for ranks in found.values()}
    assert [rank for rank, _ in one] == ["0", "1"] and one[0][1] == one[1][1]


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate, as torchrun"])
def test_another_number_of_ranks_than_the_layout_has_is_one_message(
    launcher: str, tmp_path: Path
) -> None:
    done = started(launcher, tmp_path, "tp2_pp2", "4")
    assert done.returncode != 0 and done.stderr.count("lightning_3d: ") == 1, done.stderr
    assert "needs 4 ranks" in done.stderr and "2 ranks were launched" in done.stderr
