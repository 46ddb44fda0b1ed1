"""Runs that hang, in every way that FAULTS.md knows, end with one message that says why."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import environment

from lightning_3d.health.watchdog import await_content

pytestmark = pytest.mark.slow

SCRIPT = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_3d import Lightning3DStrategy
from lightning_3d.health import watchdog
from lightning_3d.ranks.supervisor import launch

watchdog.STALE_SECONDS = 2.5

def fail(how, rank, groups):
    if how == "stopped" and rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "locked" and rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif how == "lost lock" and rank == 1:
        ctypes.PyDLL(None).sleep(60)
    elif how == "order":
        for group in groups if rank == 0 else reversed(groups):
            dist.all_reduce(torch.ones(4), group=group)
    elif how == "kinds":
        if rank == 0:
            dist.all_reduce(torch.ones(4), group=groups[0])
        else:
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=groups[0])
        dist.barrier(groups[0])

class Module(LightningModule):
    def __init__(self, how):
        super().__init__()
        self.how = how
        self.layer = torch.nn.Linear(8, 1)
        self.groups = None

    def training_step(self, batch, batch_idx):
        if self.groups is None:
            self.groups = [dist.new_group([0, 1], group_desc=name) for name in ("first", "second")]
            dist.new_group([self.trainer.global_rank], group_desc="alone", use_local_synchronization=True)
            dist.new_group([0], group_desc="only rank 0")  # torch keeps an entry for it on rank 1, too
            for group in self.groups:
                dist.barrier(group)
        if self.how == "lost lock" and batch_idx < 6:
            time.sleep(1.0)  # the watchdog sees some steps, also on a busy machine
        if batch_idx == 6:
            fail(self.how, self.trainer.global_rank, self.groups)
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def train(how):
    watchdog.ANSWER_SECONDS = 4.0 if how == "lost lock" else 1000.0  # in all others, ranks answer, or are known to be stopped
    strategy = Lightning3DStrategy("dp2", reliability={"hang_timeout": 1.5})
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    folder = "/proc/nowhere" if how == "kinds" else "."  # where nothing can be written
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=20, default_root_dir=folder, **quiet)
    trainer.fit(Module(how), DataLoader(torch.ones(400, 8), batch_size=4))

def under_a_supervisor(how):
    # A run in a folder of its own, whose ranks are forked.
    os.chdir(how)
    outcome = launch(train, (how,), 2, logs=Path("logs"), fork=True, threads=1)
    Path("said").write_text(f"{outcome.exit_code}\\n{outcome.message or ''}")
    os._exit(0)

if sys.argv[1] == "stopped":  # Lightning starts the ranks, and rank 0 serves the store where they meet
    train("stopped")
else:
    children = [pid for how in sys.argv[1:] if (pid := os.fork() or under_a_supervisor(how))]
    for child in children:
        os.waitpid(child, 0)
"""  # noqa: E501

SUPERVISED = ("locked", "lost lock", "order", "kinds", "well")


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    files: dict[str, str]


def run(folder: Path, *how: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", *how]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("hang/*")}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How runs end, by what happens in them."""
    folder = tmp_path_factory.mktemp("hangs")
    for how in SUPERVISED:
        (folder / how).mkdir()
    alone_folder = tmp_path_factory.mktemp("own")
    with ThreadPoolExecutor(1) as thread:
        own = thread.submit(run, alone_folder, "stopped")
        done = run(folder, *SUPERVISED)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Ended] = {}
    for how in SUPERVISED:
        code, _, said = (folder / how / "said").read_text().partition("\n")
        found[how] = Ended(int(code), said, files(folder / how))
    alone = own.result()
    return found | {
        "stopped": Ended(alone.returncode, alone.stdout + alone.stderr, files(alone_folder))
    }


def the_message(end: Ended) -> str:
    """The only message, which a run that hangs prints; no traceback."""
    assert end.code not in (0, 2), end.output
    assert end.output.count("The run hangs:") == 1 and "Traceback" not in end.output, end.output
    return next(line for line in end.output.splitlines() if "The run hangs:" in line)


def test_a_healthy_run_leaves_nothing(ended: dict[str, Ended]) -> None:
    assert (ended["well"].code, ended["well"].files) == (0, {}), ended["well"].output


def test_f46_stopped_rank_is_named(ended: dict[str, Ended]) -> None:
    """Rank 0, which serves the store that the others meet at."""
    said = the_message(ended["stopped"])
    expected = (
        r"rank 0 does not answer: process \d+ on \S+ is stopped \(SIGSTOP\)\. Rank 1 has waited for"
        r" it for \d+ s, in collective"
    )
    assert re.search(expected, said), said
    assert "training step 7" in ended["stopped"].files["rank_1.txt"]


def test_f46_lost_lock_is_named_with_its_place(ended: dict[str, Ended]) -> None:
    said = the_message(ended["locked"])
    assert re.search(r"rank 0 has waited for rank 1 for \d+ s, in collective \d+ \(", said), said
    expected = (
        r"Rank 1 \(\S+\) is in training step 7: forward, stage 0, micro-batch 0, for \d+ s, at"
        r" \S+script\.py:\d+ in fail\."
    )
    assert re.search(expected, said), said
    assert {"rank_0.txt", "rank_1.txt"} <= ended["locked"].files.keys()
    assert (
        "script.py" in ended["locked"].files["rank_1.txt"]
        and "last collectives of group first" in ended["locked"].files["rank_1.txt"]
    )


def test_f46_rank_that_holds_the_lock_of_python_is_named_with_its_stacks(
    ended: dict[str, Ended],
) -> None:
    said = the_message(ended["lost lock"])
    assert re.search(
        r"rank 1 does not answer: process \d+ on \S+ runs, but holds the lock of Python\.", said
    ), said
    assert "in fail" in ended["lost lock"].files["rank_1_stacks.txt"]


def test_f46_stacks_that_are_still_to_be_written_are_waited_for(tmp_path: Path) -> None:
    late, never = tmp_path / "late", tmp_path / "never"
    late.touch()
    writer = threading.Timer(0.3, late.write_text, ["in fail"])
    writer.start()
    begin = time.monotonic()
    await_content([tmp_path / "of another node", late], 60)
    assert late.read_text() == "in fail" and time.monotonic() - begin < 50
    never.touch()
    await_content([never], 0.1)


def test_f49_other_order_of_groups_is_named(ended: dict[str, Ended]) -> None:
    said = the_message(ended["order"])
    assert (
        "rank 0 waits for rank 1 in collective 2 (all_reduce of (4) float) of group first (ranks 0"
        " 1) and rank 1 waits" in said
    ), said
    assert "of group second (ranks 0 1). They have called collectives in another order." in said


def test_f49_other_collectives_are_named(ended: dict[str, Ended]) -> None:
    said = the_message(ended["kinds"])
    assert (
        "the ranks of group first (ranks 0 1) do not call the same collective as its number 2: rank"
        " 0 calls all_reduce" in said
    ), said
    assert "rank 1 calls all_gather" in said
