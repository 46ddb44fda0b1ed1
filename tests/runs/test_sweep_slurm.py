"""The engine of `hydra/launcher=slurm` where jobs are processes of this machine; with a real SLURM:
test_slurm.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_3d.app.runs.check import CheckedMachine, check_for
from lightning_3d.app.runs.sweep.jobs import SweepJob
from lightning_3d.app.runs.sweep.local_engine import Began, Ended, Interrupted, interruptible
from lightning_3d.app.runs.sweep.slurm_engine import SlurmEngine, SlurmResources, run_task
from lightning_3d.errors import ConfigError

pytest.importorskip("submitit")

CLUSTER = {"cluster": {"nodes": 1, "gpus_per_node": 0}}


def job(folder: Path, number: int, script: str, **more: Any) -> SweepJob:
    (folder / str(number)).mkdir()
    return SweepJob(
        number,
        (),
        folder / str(number),
        more.pop("config", CLUSTER),
        (sys.executable, "-c", script),
        **more,
    )


def events(jobs: list[SweepJob], at_once: int | None = None) -> list[Any]:
    return list(SlurmEngine(SlurmResources(executor="local"), at_once, poll_seconds=0.1).run(jobs))


@pytest.mark.timeout(300)
def test_jobs_are_submitted_and_their_exit_codes_come_back(tmp_path: Path) -> None:
    say = "import os, sys; print('said', os.environ['WORD'], flush=True); sys.exit(%d)"
    jobs = [job(tmp_path, code, say % code, environment={"WORD": str(code)}) for code in (0, 2)]
    happened = events(jobs)
    assert [event.job.number for event in happened if isinstance(event, Began)] == [0, 2]
    ended = {event.job.number: event.exit_code for event in happened if isinstance(event, Ended)}
    assert ended == {0: 0, 2: 2}
    assert [each.log.read_text() for each in jobs] == ["said 0\n", "said 2\n"]


def is_running(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interrupted_sweep_cancels_its_jobs(tmp_path: Path) -> None:
    # tests that a shell runs in the background ignore it, and so do their jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a shell's background jobs ignore it
    listens = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    forever = job(tmp_path, 0, f"{listens}; print(os.getpid(), flush=True); time.sleep(600)")
    engine = SlurmEngine(SlurmResources(executor="local"), poll_seconds=0.1)
    going = engine.run([forever])
    for _ in going:
        if forever.log.exists() and forever.log.read_text().strip():
            break
    pid = int(forever.log.read_text())
    going.close()
    deadline = time.monotonic() + 60  # the signal passes through the process that submitit watches
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(pid)


@pytest.mark.timeout(300)
def test_job_that_is_being_submitted_is_cancelled_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch takes a while, and may have handed the job over when the user gives up."""
    cancelled = []

    def submit(self: SlurmEngine, job: SweepJob) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return SimpleNamespace(cancel=lambda check: cancelled.append(job.number), done=lambda: True)

    monkeypatch.setattr(SlurmEngine, "_submit", submit)
    with pytest.raises(Interrupted), interruptible():
        events([job(tmp_path, 7, "")])
    assert cancelled == [7]


def test_task_that_a_signal_ends(tmp_path: Path) -> None:
    """In a process of its own: a task changes how signals are handled."""
    imports = "from lightning_3d.app.runs.sweep.slurm_engine import run_task"
    code = (
        f"{imports}; print(run_task(['sh', '-c', 'kill -KILL $$'], '{tmp_path}/log', {{}}, None))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "137"
    assert run_task.__module__ == "lightning_3d.app.runs.sweep.slurm_engine", (
        "tasks find it by this name"
    )


def test_jobs_have_nodes_and_a_task_for_each_rank(tmp_path: Path) -> None:
    large = job(tmp_path, 0, "", ranks=32, config={"cluster": {"nodes": 4, "gpus_per_node": 8}})
    parameters = SlurmResources(
        minutes=30, partition="gpu", cpus_per_task=4, srun=["--mpi=none"]
    ).parameters(large)
    asked = {
        name: parameters[name]
        for name in ("nodes", "tasks_per_node", "gpus_per_node", "timeout_min", "slurm_partition")
    }
    assert asked == {
        "nodes": 4,
        "tasks_per_node": 8,
        "gpus_per_node": 8,
        "timeout_min": 30,
        "slurm_partition": "gpu",
    }
    assert parameters["slurm_srun_args"] == ["--cpus-per-task=4", "--mpi=none"]


def test_what_cannot_be_submitted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="needs SLURM, but sbatch is not installed"):
        SlurmEngine(SlurmResources())
    with pytest.raises(ConfigError, match="jobs_at_once must be at least 1; got 0"):
        SlurmEngine(SlurmResources(executor="local"), 0)
    with pytest.raises(ConfigError, match="poll_seconds must be a number"):
        SlurmEngine(SlurmResources(executor="local"), poll_seconds="x")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match="pip install"):
        SlurmEngine(SlurmResources(executor="local"))


def test_jobs_are_checked_for_other_machines_than_this() -> None:
    from lightning_3d.app.config.compose import compose

    config = compose(
        [
            "cluster=h100_2x8",
            "parallelism=tp8_dp2",
            "model=llama3_1_8b",
            "data.global_batch_size=16",
        ]
    )
    assert (
        check_for(config, CheckedMachine.COUNTED_NODES).accelerator == "gpu"
        and config.trainer.dry is False
    )
    with pytest.raises(ConfigError, match="size of the cluster .* is unknown"):
        check_for(compose([]), CheckedMachine.COUNTED_NODES)
