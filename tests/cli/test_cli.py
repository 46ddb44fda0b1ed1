"""`lightning-3d train` from the command line to the run folder, and how a run ends in which a rank
fails."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import REPOSITORY, Result, environment, run_commands
from quick_runs import FAULTY, QUICK, losses
from starts import in_fresh_process

from lightning_3d.app.cli.main import COMMANDS

KEYS = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "COMET_API_KEY", "MY_PASSWORD")
CANARY = "canary-7d1f0c"
DIVERGES = [*QUICK, "optimizer.lr=1e20", "optimizer.scheduler=null"]
LINES: dict[str, list[str]] = {
    "run": QUICK,
    "hang": [*QUICK, *FAULTY, "+callbacks.faulty.how=hang"],
    "memory": [*QUICK, *FAULTY, "+callbacks.faulty.how=memory"],
    "sweep": ["-m", *QUICK[1:], "parallelism=dp2,tp3"],
    "private": [
        *QUICK,
        "+callbacks.listens._target_=faulty.Listens",
        "+callbacks.listens.folder=.",
    ],
    "diverges": [*DIVERGES, "trainer.checkpoint_every_n_steps=1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Result]:
    """All command lines, each with a run folder of its own below `folder`; with keys in the
    environment."""
    (folder / "listens").mkdir()
    lines = {
        name: [word.replace("folder=.", f"folder={folder / 'listens'}") for word in words]
        for name, words in LINES.items()
    }
    return dict(zip(LINES, run_lines(lines, folder, **dict.fromkeys(KEYS, CANARY)), strict=True))


def run_lines(lines: dict[str, list[str]], folder: Path, **more: str) -> list[Result]:
    commands = [
        ["train", *overrides, f"hydra.{'sweep' if name == 'sweep' else 'run'}.dir={folder / name}"]
        for name, overrides in lines.items()
    ]
    return run_commands(commands, timeout=500, warm=True, **more)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


STARTS = """
import sys
from lightning_3d.app.cli.main import main
from lightning_3d.app.training import job
job.launch = lambda *arguments, fork, **more: print("forked" if fork else "spawned") or sys.exit(1)
main(sys.argv[1:])
"""


def test_ranks_are_forked(tmp_path: Path) -> None:
    """No thread of a library is in the way, not even NumPy's: spawned ranks import everything once
    more."""
    command = [sys.executable, "-c", STARTS, "train", *QUICK, f"hydra.run.dir={tmp_path / 'run'}"]
    around = {
        key: value
        for key, value in environment().items()
        if key not in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    }
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=around, timeout=200, check=False
    )
    assert "forked" in done.stdout.splitlines(), done.stdout + done.stderr


def test_run_leaves_its_files(results: dict[str, Result], folder: Path) -> None:
    assert results["run"].code == 0, results["run"].output
    assert results["run"].left == [], "everything is in the run folder"
    names = {path.name for path in (folder / "run").iterdir()}
    files = {
        "config.yaml",
        "metrics.csv",
        "timeline.json",
        "evaluation.json",
        "report.html",
        "checkpoints",
        "logs",
        "status.json",
    }
    assert names == {*files, "train.log", ".hydra", ".lock", ".run.json"}
    assert list((folder / "run" / "checkpoints").iterdir())
    with (folder / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert float(rows[-1]["val_loss"]) > 0, "a validation ends the run"
    assert [bool(row["bubble"]) for row in rows] == [
        False,
        True,
    ], "one step is traced, the last of a short run"


def test_run_says_what_it_does(results: dict[str, Result]) -> None:
    output = results["run"].output
    assert "dp2: 2 ranks on CPU, 1F1B, ZeRO-1, fp32, 1 micro-batch of 2" in output
    assert "run folder: " in output and "validation loss" in output and "tokens/s" in output


def test_configuration_in_the_run_folder_is_complete(
    results: dict[str, Result], folder: Path
) -> None:
    text = (folder / "run" / "config.yaml").read_text()
    assert "${" not in text, "interpolations are resolved"
    config = yaml.safe_load(text)
    assert config["parallelism"]["schedule"] == "1F1B" and config["parallelism"]["vp"] == 1
    assert config["cluster"]["accelerator"] == "cpu" and config["precision"]["name"] == "fp32"
    assert config["run_folder"] == str(folder / "run")


def test_failing_rank_is_told_once_and_ends_those_that_hang(
    results: dict[str, Result], folder: Path
) -> None:
    result = results["hang"]
    assert result.code == 1
    assert result.output.count("ArithmeticError: rank 1 cannot go on") == 1, result.output
    assert result.output.count("Traceback") == 1
    assert "lightning_3d: rank 1 of 2 failed" in result.output
    assert (folder / "hang" / "metrics.csv").is_file(), "what the run did until then is kept"
    page = (folder / "hang" / "report.html").read_text()
    assert "This run failed" in page and "ArithmeticError: rank 1 cannot go on" in page


def test_f53_lack_of_memory_is_explained(results: dict[str, Result], folder: Path) -> None:
    result = results["memory"]
    assert result.code == 1 and "Traceback" not in result.output, result.output
    said = (
        r"lightning_3d: Rank 1 \(\S+, cpu\) ran out of memory \(between two steps\), at"
        r" \S+faulty\.py:\d+ in \S*on_train_batch_start\."
    )
    assert re.search(
        said + r" It asked for 4194304\.0 GiB\.\nIt holds:\n  weights +[\d.]+ MiB\n  gradients",
        result.output,
    ), result.output
    assert re.search(
        r"Its largest weights:\n  \S+\.weight \(\d+, \d+\), [\d.]+ MiB\n", result.output
    )
    assert re.search(
        r"The planner predicts [\d.]+ GiB for the fullest rank of dp2:\n  weights .*\n  gradients",
        result.output,
    )
    assert "ran out of memory" in (folder / "memory" / "status.json").read_text()


@pytest.mark.full
def test_f48_killed_rank_is_named() -> None:
    (result,) = run_commands([["train", *QUICK, *FAULTY, "+callbacks.faulty.how=kill"]])
    assert result.code == 1
    assert "rank 1 of 2 failed:\nit was killed by SIGKILL (out of memory?)" in result.output
    assert "Traceback" not in result.output


@pytest.mark.full
def test_fresh_interpreters_train_as_well(results: dict[str, Result], folder: Path) -> None:
    [spawned] = run_lines({"spawn": [*QUICK, "trainer.start_method=spawn"]}, folder)
    assert spawned.code == 0, spawned.output
    assert losses(folder / "spawn") == losses(folder / "run")


def test_sweep_runs_a_job_in_ranks_of_its_own(results: dict[str, Result], folder: Path) -> None:
    result = results["sweep"]
    assert result.code == 0, "what does not fit is skipped"
    skipped = result.output.index("job 1 skipped: parallelism=tp3: Tensor parallelism assigns")
    assert skipped < result.output.index("[1/1] job 0: parallelism=dp2"), (
        "it is said before the first job starts"
    )
    assert [row["status"] for row in csv.DictReader((folder / "sweep" / "sweep.csv").open())] == [
        "finished",
        "skipped",
    ]
    assert not (folder / "sweep" / "1").exists()
    page = (folder / "sweep" / "sweep.html").read_text()
    assert (
        '"report": "0/report.html"' in page and (folder / "sweep" / "0" / "report.html").is_file()
    )
    assert yaml.safe_load((folder / "sweep" / "0" / "config.yaml").read_text())["parallelism"][
        "layout"
    ]
    assert losses(folder / "sweep" / "0") == losses(folder / "run"), (
        "a job computes what the run alone does"
    )


def test_f22_no_key_is_in_a_file_of_a_run(results: dict[str, Result], folder: Path) -> None:
    assert results["private"].code == 0, results["private"].output
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 30
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert not [name for name, result in results.items() if CANARY in result.output]


def test_f22_a_run_on_one_machine_listens_on_this_machine_only(
    results: dict[str, Result], folder: Path
) -> None:
    assert results["private"].code == 0, results["private"].output
    for rank in (0, 1):
        assert (folder / "listens" / f"listens-{rank}").read_text() == "0100007F", "127.0.0.1"


@pytest.mark.full
def test_callbacks_and_logger_are_choices(folder: Path) -> None:
    [quiet] = run_lines({"quiet": [*QUICK, "callbacks=none", "logger=csv"]}, folder)
    assert quiet.code == 0, quiet.output
    assert "tokens/s" not in quiet.output
    assert not (folder / "quiet" / "metrics.csv").exists()
    assert (folder / "quiet" / "csv" / "metrics.csv").is_file()


def test_ranks_that_torchrun_starts_train_into_one_folder(
    tmp_path: Path, results: dict[str, Result], folder: Path
) -> None:
    """Its agent, rendezvous and environment, with ranks that are forked from a warm process."""
    in_fresh_process(forked_by_torchrun, tmp_path, QUICK, 2)
    (run,) = (tmp_path / "outputs").glob("*/*")
    assert losses(run) == losses(folder / "run")


def test_f48_an_elastic_run_uses_the_ranks_that_are_there(
    tmp_path: Path, results: dict[str, Result], folder: Path
) -> None:
    """Of three ranks: three data-parallel ranks would not divide the batch of 4, so one rank has no
    work."""
    lines = [
        *QUICK,
        "parallelism=dp4",
        "parallelism.micro_batch_size=1",
        "parallelism.elastic=true",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]
    in_fresh_process(forked_by_torchrun, tmp_path, lines, 3)
    parts = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["parallelism"]
    assert (parts["layout"], parts["elastic"]) == ("dp2", "dp4")
    assert list(map(float, losses(tmp_path / "run"))) == pytest.approx(
        list(map(float, losses(folder / "run"))), rel=1e-5
    )


def forked_by_torchrun(folder: Path, lines: list[str], ranks: int) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(environment())
    os.chdir(folder)
    place = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "some ranks"}
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=ranks, max_restarts=0, start_method="fork", **place
    )
    elastic_launch(config, train_here)(lines)


def train_here(overrides: list[str]) -> None:
    from lightning_3d.app.cli import main

    assert main(["train", *overrides]) == 0


def torchrun(overrides: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        str(REPOSITORY / "train.py"),
    ]
    return subprocess.run(
        [*command, *overrides],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.full
def test_torchrun_trains_into_one_folder(
    tmp_path: Path, results: dict[str, Result], folder: Path
) -> None:
    done = torchrun(QUICK, tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "outputs").glob("*/*")
    assert losses(run) == losses(folder / "run")


@pytest.mark.full
def test_failure_under_torchrun_is_told_once(tmp_path: Path) -> None:
    started = time.monotonic()
    done = torchrun([*QUICK, *FAULTY], tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("ArithmeticError: rank 1 cannot go on") == 1, done.stderr
    assert done.stderr.count("lightning_3d: rank 1 of 2 failed") == 1
    assert "onnection closed" not in done.stderr
    assert time.monotonic() - started < 240


def test_usage_and_version() -> None:
    usage, bare, version = run_commands([["--help"], [], ["--version"]])
    assert usage.code == bare.code == version.code == 0 and bare.output == usage.output
    assert version.output.strip()[0].isdigit()
    shown = re.findall(r"^([A-Z][a-z ]+):$|^  ([a-z-]+)  ", usage.output, re.MULTILINE)
    purposes = [purpose for purpose, _ in shown if purpose]
    middle = [
        "Check a cluster",
        "Choose a layout",
        "Bring your own model",
        "Prepare data",
        "Use checkpoints and results",
    ]
    assert purposes == ["Train", *middle, "Options"]
    assert [command for _, command in shown if command and command[0] != "-"] == list(COMMANDS)


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    command = f"{sys.executable} {REPOSITORY / 'train.py'} --help | head -n 1"
    done = subprocess.run(
        command,
        shell=True,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout.startswith("Trains a causal language model") and done.stderr == ""


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fifty_runs_in_a_row_end_well(tmp_path: Path) -> None:
    failed = {}
    for number in range(50):
        command = [
            sys.executable,
            str(REPOSITORY / "train.py"),
            *QUICK,
            f"hydra.run.dir={tmp_path / str(number)}",
        ]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False, timeout=300
        )
        if done.returncode != 0:
            failed[number] = (done.returncode, done.stdout + done.stderr)
    assert failed == {}


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_its_checkpoint(
    results: dict[str, Result], folder: Path
) -> None:
    output = results["diverges"].output
    assert results["diverges"].code == 1, output
    assert output.count("lightning_3d: Step 2: the loss is nan and the gradient norm is nan.") == 1
    assert "Traceback" not in output and "lower learning rate (now 1e+20)" in output
    status = json.loads((folder / "diverges" / "status.json").read_text())
    assert (status["status"], status["exit_code"]) == (
        "failed",
        1,
    ) and "Step 2: the loss is nan" in status["reason"]
    assert [path.name for path in (folder / "diverges" / "checkpoints").glob("*")] == [
        "step_1.ckpt"
    ]


@pytest.mark.full
def test_a_run_that_skips_steps_says_how_many(folder: Path) -> None:
    [skips] = run_lines({"skips": [*DIVERGES, "trainer.nonfinite=skip"]}, folder)
    output = skips.output
    assert skips.code == 0, output
    assert (
        "Step 2: the loss is nan" in output
        and "The optimizer skips this step (skipped so far: 1)." in output
    )
    [row] = [line for line in output.splitlines() if line.startswith("skipped steps")]
    assert row.split("  ")[-1].strip() == "1 (loss or gradient norm was not finite)"
    assert "training loss      nan" not in output
