"""`lightning-3d plan --validate` on several nodes: srun starts the ranks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import environment, run_commands
from made_profile import made
from processes import is_running
from srun_here import install

from lightning_3d.app.cli.plan_validation import require_here, starter
from lightning_3d.app.config.cluster import ClusterConfig
from lightning_3d.app.planner.profile_file import machine_of_profile, read_profile
from lightning_3d.errors import ConfigError

TINY = [
    *(
        "cluster=local_cpu",
        "cluster.nodes=2",
        "+cluster.inter_node.bandwidth=1e9",
        "data.sequence_length=32",
        "data.global_batch_size=8",
    ),
    *(
        f"model.config.{key}={value}"
        for key, value in {"hidden_size": 32, "intermediate_size": 64, "head_dim": 4}.items()
    ),
    "model.config.num_hidden_layers=2",
]


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Of a machine with one CPU rank."""
    file = tmp_path / "profile.json"
    about = {
        "device": "cpu",
        "name": "cores",
        "memory": 8e9,
        "ranks": 1,
        "ranks_per_node": 1,
        "precision": "fp32",
    }
    file.write_text(json.dumps(made(**about)))
    return file


def nodes(count: int) -> ClusterConfig:
    return ClusterConfig(name="cores", nodes=count, gpus_per_node=0, accelerator="cpu")


def test_srun_starts_the_ranks_of_each_node(profile: Path) -> None:
    machine = machine_of_profile(read_profile(profile), nodes=3)
    assert starter(machine, nodes(3)) == [
        "srun",
        "--kill-on-bad-exit=1",
        "--quit-on-interrupt",
        "--nodes=3",
        "--ntasks-per-node=1",
    ]
    assert starter(replace(machine, nodes=1), nodes(1)) == []


def test_nodes_that_fast_links_join_are_still_several(profile: Path) -> None:
    """The planner takes 4 nodes of 2 GPUs whose links are one network for one node."""
    machine = replace(machine_of_profile(read_profile(profile)), nodes=1, gpus_per_node=8)
    assert starter(machine, nodes(4))[3:] == ["--nodes=4", "--ntasks-per-node=2"]


def test_nodes_outside_of_a_job_are_refused(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machine_of_profile(read_profile(profile), nodes=4)
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    with pytest.raises(
        ConfigError,
        match=r"in a job \(salloc --nodes=4 --ntasks-per-node=1\), or use a cluster of one node\.",
    ):
        require_here(machine, nodes(4))
    for name, value in install(tmp_path / "bin").items():
        monkeypatch.setenv(name, value)
    require_here(machine_of_profile(read_profile(profile), nodes=2), nodes(2))
    with pytest.raises(
        ConfigError, match=r"for 4 nodes, but this SLURM job has 2\. Use a job with more"
    ):
        require_here(machine, nodes(4))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_best_layout_is_run_on_the_nodes_of_a_job(profile: Path, tmp_path: Path) -> None:
    variables = install(tmp_path / "bin")
    line = [
        "plan",
        *TINY,
        f"profile={profile}",
        "--out",
        str(tmp_path),
        "--validate",
        "1",
        "--steps",
        "1",
    ]
    (answer,) = run_commands([line], timeout=500, **variables)
    assert answer.code == 0, answer.output
    row = next(
        line
        for line in answer.output.splitlines()
        if line.startswith("| ") and "layout" not in line
    )
    _, layout, predicted, measured, ratio, *_ = [cell.strip() for cell in row.split("|")]
    assert float(ratio) == pytest.approx(float(predicted) / float(measured), rel=0.05, abs=0.01)
    (started,) = (tmp_path / "bin" / "srun.log").read_text().splitlines()
    assert f"parallelism={layout}" in started and "--nodes=2 --ntasks-per-node=1" in started
    assert not list(tmp_path.glob("lightning_3d_validation_*")), "the folder of the run stays"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_interruption_ends_the_ranks_of_all_nodes(profile: Path, tmp_path: Path) -> None:
    log = tmp_path / "bin" / "srun.log"
    line = [
        "plan",
        *TINY,
        f"profile={profile}",
        "--out",
        str(tmp_path),
        "--validate",
        "1",
        "--steps",
        "100000",
    ]
    command = [sys.executable, "-m", "lightning_3d", *line]
    variables = environment(**install(tmp_path / "bin"))
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=listen
    ) as plan:
        try:
            while not (log.exists() and log.read_text().endswith("\n")):
                assert plan.poll() is None, plan.stderr and plan.stderr.read()
                time.sleep(0.1)
            ranks = [int(word) for word in log.read_text().split()[:2]]
            assert all(is_running(rank) for rank in ranks)
            plan.send_signal(signal.SIGINT)
            started = time.monotonic()
            plan.wait(120)
            assert time.monotonic() - started < 10
            assert plan.returncode not in (0, 1)
            assert not any(is_running(rank) for rank in ranks)
            assert not list(tmp_path.glob("lightning_3d_validation_*"))
        finally:
            plan.kill()
            for rank in map(int, log.read_text().split()[:2] if log.exists() else []):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)


def listen() -> None:
    """Processes that a shell runs in the background ignore interruptions, and so do those that they
    start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
