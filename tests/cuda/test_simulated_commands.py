"""The command line on simulated GPUs, each rank a process of its own."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_runs import QUICK

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of this environment in ``folder``; its output goes to a file, so that nothing waits
    for children that hold a pipe."""
    unwanted = ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment = (
        kept
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        | variables
    )
    with (folder / "output.txt").open("w+") as output:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            timeout=480,
            check=False,
        )
        output.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, output.read())


def losses(folder: Path) -> list[float]:
    [metrics] = folder.glob("outputs/*/*/metrics.csv")
    with metrics.open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


WIDE = [word for word in QUICK if not word.startswith("parallelism")]


@pytest.mark.timeout(560)
def test_train_on_eight_ranks(tmp_path: Path) -> None:
    layout = ["parallelism=tp2_pp2_dp2", "parallelism.micro_batch_size=1", "precision=fp32"]
    done = run(tmp_path, "-m", "lightning_3d", "train", *layout, *WIDE)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "8 ranks on GPUs" in done.stdout
    assert "device             simulated GPU" in done.stdout
    assert [word for word in ("RACE on", "MISMATCH", "HANG in") if word in done.stdout] == []
    [report] = tmp_path.glob("outputs/*/*/report.html")
    assert "simulated GPU" in report.read_text()
    cpu = tmp_path / "cpu"
    cpu.mkdir()
    other = run(cpu, "-m", "lightning_3d", "train", "cluster=local_cpu", *layout, *WIDE)
    assert other.returncode == 0, other.stdout[-4000:]
    assert "8 ranks on CPU" in other.stdout and "device  " not in other.stdout
    assert losses(tmp_path) == pytest.approx(losses(cpu), rel=1e-5)


@pytest.mark.timeout(560)
def test_train_under_torchrun(tmp_path: Path) -> None:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lightning_3d",
        "train",
        "parallelism=dp2",
    ]
    done = run(tmp_path, *command, "parallelism.micro_batch_size=2", *WIDE)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "2 ranks on GPUs" in done.stdout and "simulated GPU" in done.stdout
    assert len(losses(tmp_path)) == 2


@pytest.mark.timeout(560)
def test_doctor_and_selftest(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "lightning_3d", "doctor", "parallelism=tp2_dp2", CUDASIM_DEVICES="4")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "the GPUs are simulated" in done.stdout and "0 wrong" in done.stdout
    done = run(
        tmp_path,
        "-m",
        "lightning_3d",
        "selftest",
        "--only",
        "tp,zero",
        "--minutes",
        "2",
        CUDASIM_DEVICES="2",
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "simulated GPU" in done.stdout and "WRONG" not in done.stdout


@pytest.mark.timeout(240)
def test_ranks_of_a_selftest_share_gpus(tmp_path: Path) -> None:
    words = ["--only", "tp,pp,zero", "--minutes", "3", "--ranks", "4"]
    done = run(tmp_path, "-m", "lightning_3d", "selftest", *words, CUDASIM_DEVICES="2")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "4 ranks share 2 x simulated GPU" in done.stdout and "needs 4 ranks" not in done.stdout


@pytest.mark.timeout(120)
def test_doctor_names_a_gpu_that_is_slowed_down(tmp_path: Path) -> None:
    slow = '{"1": {"clocks_event_reasons.active": "0x0000000000000008", "temperature.gpu": "91"}}'
    done = run(
        tmp_path,
        "-m",
        "lightning_3d",
        "doctor",
        "parallelism=dp2",
        CUDASIM_DEVICES="2",
        CUDASIM_SMI=slow,
    )
    assert done.returncode == 1, done.stdout[-4000:]
    assert "rank 1" in done.stdout
