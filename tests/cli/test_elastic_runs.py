"""What a lost node does to a run, and an elastic run that continues without it. One with ranks to
spare is in test_cli.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import REPOSITORY, environment
from quick_runs import QUICK, losses
from two_nodes import ADDRESSES, TwoNodes, available, two_nodes

pytestmark = pytest.mark.timeout(600)
# it prints a line
SIZES = [line for line in QUICK if not line.startswith(("parallelism", "trainer"))] + [
    "parallelism.self_check=never"
]


@pytest.fixture
def nodes(tmp_path: Path) -> TwoNodes:
    if not available():
        pytest.skip("this machine lets nobody make network namespaces")
    with two_nodes(tmp_path) as made:
        yield made


def torchrun(nodes: str, restarts: int, lines: list[str], folder: Path) -> list[str]:
    place = [
        "--nnodes",
        nodes,
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{ADDRESSES[0]}:29400",
    ]
    more = [
        "--rdzv-id",
        "elastic",
        "--max-restarts",
        str(restarts),
        "--rdzv-conf",
        "last_call_timeout=5",
    ]
    run = [
        str(REPOSITORY / "train.py"),
        *SIZES,
        "cluster=local_cpu",
        *lines,
        f"hydra.run.dir={folder / 'run'}",
    ]
    return [sys.executable, "-m", "torch.distributed.run", *place, *more, *run]


def steps(folder: Path) -> int:
    path = folder / "run" / "metrics.csv"
    return len(losses(folder / "run")) if path.is_file() else 0


def wait(until: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.full
def test_f48_a_lost_node_ends_the_run(nodes: TwoNodes, tmp_path: Path) -> None:
    lines = [
        "parallelism=tp2_dp2",
        "parallelism.micro_batch_size=1",
        "trainer.max_steps=100000",
        "trainer.val_check_interval=100000",
    ]
    lines += ["trainer.hang_timeout=20"]
    command, logs = (
        torchrun("2", 0, lines, tmp_path),
        [tmp_path / "node0.log", tmp_path / "node1.log"],
    )
    first, _ = (nodes.start(node, command, tmp_path, environment(), logs[node]) for node in (0, 1))
    wait(lambda: steps(tmp_path) > 10)
    nodes.cut()
    assert first.wait(120) != 0
    said = logs[0].read_text()
    assert said.count("lightning_3d:") == 1, said
    assert all(f"rank {rank} does not answer" in said for rank in (2, 3)) and "on node1" in said
    wait(lambda: "rank 0 does not answer" in logs[1].read_text(), 60)


@pytest.mark.full
def test_f48_an_elastic_run_continues_without_a_node_and_grows_again(
    nodes: TwoNodes, tmp_path: Path
) -> None:
    """Losses are those of the undisturbed run, whichever ranks there are."""
    lines = [
        "parallelism=tp2_dp2",
        "parallelism.micro_batch_size=1",
        "parallelism.elastic=true",
        "trainer.checkpoint_every_n_steps=20",
    ]
    length = [
        "trainer.max_steps=1000",
        "trainer.val_check_interval=1000",
        "trainer.log_every_n_steps=100",
    ]
    command, logs = (
        torchrun("1:2", 5, [*lines, *length], tmp_path),
        [tmp_path / "node0.log", tmp_path / "node1.log"],
    )
    env = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    first, second = (nodes.start(node, command, tmp_path, env, logs[node]) for node in (0, 1))
    wait(lambda: steps(tmp_path) > 30)
    nodes.cut()
    wait(
        lambda: (
            "2 of 4 ranks are here, so this elastic run uses tp2 instead of tp2_dp2"
            in logs[0].read_text()
        )
    )
    before = steps(tmp_path)
    wait(lambda: steps(tmp_path) > before + 30)
    os.killpg(second.pid, signal.SIGKILL)
    nodes.mend()
    second = nodes.start(1, command, tmp_path, env, logs[1])
    assert first.wait(300) == 0 and second.wait(60) == 0, logs[0].read_text()
    assert logs[0].read_text().count("tp2_dp2: 4 ranks on CPU") == 2, (
        "before the loss, and after the return"
    )
    undisturbed = tmp_path / "undisturbed"
    again = [
        *SIZES,
        "cluster=local_cpu",
        "parallelism=tp2_dp2",
        "parallelism.micro_batch_size=1",
        *length,
        f"hydra.run.dir={undisturbed}",
    ]
    subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), *again],
        env=environment(),
        check=True,
        timeout=400,
        cwd=tmp_path,
    )
    assert list(map(float, losses(tmp_path / "run"))) == pytest.approx(
        list(map(float, losses(undisturbed))), rel=1e-4
    )
