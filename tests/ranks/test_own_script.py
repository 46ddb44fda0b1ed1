"""A user's own script under Lightning's launcher, where rank 0 starts the others: how it ends when
a rank fails."""

import inspect
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from command_line import environment

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from lightning_3d import Lightning3DStrategy, PeriodicCheckpoint
from lightning_3d.errors import ConfigError

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores Ctrl-C
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ENDS = {"int": signal.SIGINT, "hup": signal.SIGHUP}
how, failing = sys.argv[1], int(sys.argv[2])
if how == "early" and os.environ.get("LOCAL_RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)

class Fails(Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if index != 1 or how in ("well", "early"):
            return
        if how in ENDS:  # as a terminal does, to every process of the script
            os.kill(os.getpid(), ENDS[how])
            return
        if how == "term":
            if trainer.global_rank == failing:
                os.kill(os.getpid(), signal.SIGTERM)
            return
        if trainer.global_rank != failing:
            time.sleep(600 if how in ("hang", "kill") else 0)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "refuse":
            raise ConfigError("this cannot be done.")
        else:
            raise ArithmeticError("cannot go on")

class Module(LightningModule):
    def configure_model(self):
        if hasattr(self, "model"):
            return
        sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        self.model = LlamaForCausalLM(LlamaConfig(**sizes))

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.model(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
callbacks = [Fails()]
if how in ENDS:
    callbacks, quiet["enable_checkpointing"] = [Fails(), PeriodicCheckpoint("checkpoints")], True
strategy = Lightning3DStrategy("pp2", micro_batch_size=2, zero_stage=1, self_check="never")  # it would print a line
steps = 100_000 if how in ("term", *ENDS) else 2
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=steps, callbacks=callbacks, **quiet)
module, loader = Module(), DataLoader(rows, batch_size=4)
trainer.fit(module, loader)
if how == "well":  # the ranks are there already
    trainer.test(module, loader, verbose=False)
    trainer.fit(module, loader)
"""  # noqa: E501

RARE = (  # much like others, also in other files: in the long sweeps
    "well",
    "child raises",
    "rank 0 raises",
    "child refuses",
    "child raises, rank 0 hangs",
    "child is killed, rank 0 hangs",
    "rank 0 is told to end",
    "child is told to end",
    "Ctrl-C",
    "child dies before the ranks meet",
)
CASES = {  # how, failing rank, exit code, what is said once
    "well": ("well", 0, 0, None),
    "child raises": ("raise", 1, 1, "ArithmeticError: cannot go on"),
    "rank 0 raises": ("raise", 0, 1, "ArithmeticError: cannot go on"),
    "child refuses": ("refuse", 1, 2, "lightning_3d: this cannot be done."),
    "child raises, rank 0 hangs": ("hang", 1, 1, "ArithmeticError: cannot go on"),
    "child is killed, rank 0 hangs": (
        "kill",
        1,
        1,
        "rank 1 of 2 failed:\nit was killed by SIGKILL (out of memory?)",
    ),
    "rank 0 is killed, child hangs": (
        "kill",
        0,
        -signal.SIGKILL,
        "rank 0 of 2 failed:\nit ended and reported no error.",
    ),
    "rank 0 is told to end": ("term", 0, 0, "SIGTERM: the fit stops before the next batch."),
    "child is told to end": ("term", 1, 0, "SIGTERM: the fit stops before the next batch."),
    "Ctrl-C": ("int", 0, 130, "SIGINT: the fit stopped after step 2."),
    "the terminal is closed": ("hup", 0, 129, "SIGHUP: the fit stopped after step 2."),
    "child dies before the ranks meet": (
        "early",
        1,
        1,
        "rank 1 of 2 failed:\nit was killed by SIGKILL (out of memory?)",
    ),
}


def run(case: str, folder: Path) -> tuple[int, str, float]:
    """(exit code, output of all ranks, seconds from the end of the imports to that of the last
    rank)."""
    how, failing, *_ = CASES[case]
    log = folder / f"{case}.txt"
    command = [sys.executable, "-W", "ignore", str(folder / "script.py"), how, str(failing)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment(), stdout=output, stderr=subprocess.STDOUT, cwd=folder
        )
        seen: dict[int, psutil.Process] = {}
        deadline = time.monotonic() + 200
        while process.poll() is None and time.monotonic() < deadline:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                seen[child.pid] = child
            time.sleep(0.2)
        code = process.poll()
        if code is None:
            for each in (process, *seen.values()):
                each.kill()
            return process.wait(), f"{case}: still running after 200 s\n{log.read_text()}", 0.0
        ended = time.monotonic()
        _, alive = psutil.wait_procs(list(seen.values()), timeout=40)
        for child in alive:
            child.kill()
    assert not alive, f"{case}: the child outlives rank 0"
    return code, log.read_text(), time.monotonic() - ended


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, float]]:
    """Of the cases that this session runs."""
    folder = tmp_path_factory.mktemp("own_script")
    (folder / "script.py").write_text(SCRIPT)
    chosen = [
        item.callspec.params["case"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(chosen, pool.map(lambda case: run(case, folder), chosen), strict=True))


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full) if case in RARE else case for case in CASES]
)
def test_script_ends_with_the_cause(case: str, results: dict[str, tuple[int, str, float]]) -> None:
    _, _, expected, said = CASES[case]
    code, output, _ = results[case]
    assert code == expected, output
    if said is not None:
        assert output.count(said) == 1, output
        assert output.replace("lightning_3d: global batch", "").count("lightning_3d: ") == (
            0 if expected in (0, 129, 130) else 1
        ), output
    if case in ("Ctrl-C", "the terminal is closed"):
        saved = Path(re.findall(r'Resume with trainer.fit\(..., ckpt_path="(.*)"\)', output)[0])
        assert saved.name == "step_2.ckpt" and (saved / "manifest.json").is_file(), output
    if "refuses" in case:
        assert "Traceback" not in output


def test_lightning_says_how_a_script_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract of the private functions that `lightning_compat.subprocess_launcher` uses."""
    from lightning.fabric.strategies.launchers.subprocess_script import (
        _basic_subprocess_cmd,
        _hydra_subprocess_cmd,
    )

    monkeypatch.setattr(sys, "argv", ["mine.py", "one", "two"])
    command = [*_basic_subprocess_cmd()]
    assert command[0] == sys.executable and command[-2:] == ["one", "two"]
    assert list(inspect.signature(_hydra_subprocess_cmd).parameters) == ["local_rank"]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fifty_runs_in_a_row_end_well(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = [run("well", tmp_path) for _ in range(50)]
    assert [code for code, *_ in ended] == [0] * 50, [output for code, output, _ in ended if code]
