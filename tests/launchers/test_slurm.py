"""A real SLURM with two nodes: srun, the script of `lightning-3d launch slurm`, cancelling,
starting again."""

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import REPOSITORY, environment
from processes import is_running
from quick_runs import QUICK
from slurm_cluster import Slurm, cluster, wait_until, why_not

RUN = [
    "parallelism=tp2_dp2",
    "parallelism.micro_batch_size=2",
    "cluster=local_cpu",
    *QUICK[2:],
    "trainer.max_steps=4",
]
FAULTY = [
    "+callbacks.faulty._target_=faulty.FailAtStep",
    "+callbacks.faulty.rank=3",
    "+callbacks.faulty.step=2",
]
LAUNCH = [sys.executable, "-m", "lightning_3d", "launch", "slurm", *RUN, "cluster.nodes=2"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step + 1) for step in range(len(rows))]
    return [float(row["loss"]) for row in rows]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the same run, whose ranks this machine starts."""
    folder = tmp_path_factory.mktemp("here") / "run"
    command = [sys.executable, str(REPOSITORY / "train.py"), *RUN, f"hydra.run.dir={folder}"]
    subprocess.run(command, env=environment(), check=True, capture_output=True, timeout=300)
    return losses(folder)


def submit(slurm: Slurm, folder: Path, *more: str) -> str:
    """The number of the job that `lightning-3d launch slurm` submits."""
    done = slurm.run(*LAUNCH, *more, cwd=folder)
    assert done.returncode == 0, done.stdout
    return re.search(r"Submitted batch job (\d+)", done.stdout)[1]  # type: ignore[index]


def printed(folder: Path, job: str) -> str:
    file = folder / f"slurm-{job}.out"
    return file.read_text() if file.exists() else ""


def test_srun_starts_the_ranks_of_two_nodes(
    slurm: Slurm, tmp_path: Path, here: list[float]
) -> None:
    train = [sys.executable, str(REPOSITORY / "train.py"), *RUN]
    done = slurm.run("srun", "-N2", "--ntasks-per-node=2", *train, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    (run,) = (tmp_path / "outputs").glob("*/*")
    assert losses(run) == pytest.approx(here, rel=1e-6)
    assert done.stdout.count("run folder: ") == 1


def test_wrong_number_of_tasks_is_refused_once(slurm: Slurm, tmp_path: Path) -> None:
    train = [sys.executable, str(REPOSITORY / "train.py"), *RUN]
    done = slurm.run("srun", "-N2", "--ntasks-per-node=1", *train, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stdout.count("lightning_3d: Layout") == 1 and "2 ranks were launched" in done.stdout
    assert "Traceback" not in done.stdout and not (tmp_path / "outputs").exists()


def test_launch_submits_a_job(slurm: Slurm, tmp_path: Path, here: list[float]) -> None:
    job = submit(slurm, tmp_path, "launch.name=quick", "launch.cpus_per_task=2", "launch.time=10")
    state = slurm.wait(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), printed(tmp_path, job)
    assert losses(tmp_path / "outputs" / f"quick_{job}") == pytest.approx(here, rel=1e-6)


def test_printed_script_goes_to_sbatch_and_a_failing_rank_ends_the_job(
    slurm: Slurm, tmp_path: Path
) -> None:
    script = slurm.run(*LAUNCH, "--dry", *FAULTY, cwd=tmp_path).stdout
    job = slurm.run("sbatch", "--parsable", cwd=tmp_path, text=script).stdout.strip()
    state = slurm.wait(job)
    output = printed(tmp_path, job)
    assert (state["JobState"], state["ExitCode"]) == ("FAILED", "1:0"), output
    assert output.count("ArithmeticError: rank 3 cannot go on") == 1, output
    assert (
        output.count("lightning_3d: rank 3 of 4 failed") == 1 and "onnection closed" not in output
    )


@pytest.fixture
def running(slurm: Slurm, tmp_path: Path) -> str:
    """A job of many steps that has done some."""
    job = submit(
        slurm,
        tmp_path,
        "launch.name=long",
        "trainer.max_steps=4000",
        "trainer.checkpoint_every_n_steps=2",
    )
    wait_until(
        lambda: (
            (tmp_path / "outputs" / f"long_{job}" / "checkpoints" / "step_4.ckpt").exists()
            or ended(slurm, job)
        ),
        300,
    )
    assert not ended(slurm, job), printed(tmp_path, job)
    return job


def ended(slurm: Slurm, job: str) -> bool:
    return slurm.state(job).get("JobState") not in ("PENDING", "RUNNING", "CONFIGURING")


def ranks_of(folder: Path) -> list[int]:
    """Processes that train in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if "-m\0lightning_3d" in (process / "cmdline").read_text() and (
                process / "cwd"
            ).resolve().is_relative_to(folder):
                found.append(int(process.name))
        except OSError:  # it ended
            continue
    return found


def test_cancelled_job_leaves_nothing(slurm: Slurm, tmp_path: Path, running: str) -> None:
    ranks = ranks_of(tmp_path)
    assert len(ranks) >= 4
    slurm.run("scancel", running, cwd=tmp_path)
    assert slurm.wait(running, 120)["JobState"] == "CANCELLED"
    wait_until(lambda: not any(is_running(rank) for rank in ranks), 60)
    assert "Traceback" not in printed(tmp_path, running), printed(tmp_path, running)


def test_requeued_job_goes_on_where_it_was(slurm: Slurm, tmp_path: Path, running: str) -> None:
    folder = tmp_path / "outputs" / f"long_{running}"
    slurm.run("scontrol", "requeue", running, cwd=tmp_path)
    wait_until(lambda: "resuming from " in printed(tmp_path, running), 300)
    before = len(losses(folder))
    assert before >= 4
    wait_until(lambda: len(losses(folder)) > before + 4 or ended(slurm, running), 300)
    slurm.run("scancel", running, cwd=tmp_path)
    slurm.wait(running, 120)
    assert len(losses(folder)) > before + 4, printed(tmp_path, running)
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [folder.name]


def test_sweep_submits_a_job_for_each_layout(
    slurm: Slurm, tmp_path: Path, here: list[float]
) -> None:
    pytest.importorskip("submitit")
    sweep = [
        "-m",
        "hydra/launcher=slurm",
        "cluster.nodes=2",
        "parallelism=tp2_dp2,tp4,tp3",
        "hydra.sweep.dir=sweep",
    ]
    options = [
        "hydra.launcher.poll_seconds=1",
        "hydra.launcher.minutes=10",
        "hydra.launcher.cpus_per_task=1",
    ]
    done = slurm.run(
        sys.executable, "-m", "lightning_3d", "train", *sweep, *options, *RUN[1:], cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("(SLURM job ") == 2 and "job 2 skipped" in done.stdout, done.stdout
    for number in "01":
        assert losses(tmp_path / "sweep" / number) == pytest.approx(here, rel=1e-5)
        assert (tmp_path / "sweep" / number / "job.log").read_text().count("run folder: ") == 1


def test_sweep_says_why_a_job_failed(slurm: Slurm, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    sweep = [
        "-m",
        "hydra/launcher=slurm",
        "cluster.nodes=2",
        "seed=0,1",
        "hydra.sweep.dir=sweep",
        "hydra.launcher.poll_seconds=1",
    ]
    done = slurm.run(
        sys.executable, "-m", "lightning_3d", "train", *sweep, *RUN, *FAULTY, cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("exit code 1") == 2, done.stdout
    assert (tmp_path / "sweep" / "0" / "job.log").read_text().count(
        "ArithmeticError: rank 3 cannot go on"
    ) == 1
