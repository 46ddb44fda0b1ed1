"""Weights & Biases: one run for a job whatever its ranks and starts, with all that metrics.csv
has."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from command_line import REPOSITORY, Result, environment, run_commands
from quick_runs import QUICK
from wandb_file import WandbRun, files_of, read

from lightning_3d.app.planner.utilization import full_speed
from lightning_3d.app.runs.wandb_access import check_access
from lightning_3d.app.training.callbacks.metrics_csv import COLUMNS
from lightning_3d.app.training.run_record import same_run
from lightning_3d.app.training.wandb_logger import WandbLogger
from lightning_3d.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OFFLINE = ["logger=wandb", "logger.wandb.offline=true", "cluster=local_cpu"]
SMALL = [*QUICK[1:], "trainer.log_every_n_steps=1"]
FOUR = [
    "model=mixtral_tiny",
    "parallelism=pp2_dp2",
    "parallelism.moe_aux_loss=0.01",
    "parallelism.micro_batch_size=2",
    "data.sequence_length=32",
    "data.global_batch_size=8",
    "data.val_sequences=4",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.trace_every_n_steps=2",
    "trainer.log_every_n_steps=1",
    "trainer.checkpoint_every_n_steps=2",
    "logger.wandb.tags=[mine]",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wandb")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Result]:
    """A run on 4 ranks, and one on a single rank that goes on from its second step, in another
    folder."""
    go_on = [*FOUR, "parallelism=tp1", f"trainer.resume={folder}/four/checkpoints/step_2.ckpt"]
    lines = {"four": FOUR, "resumed": go_on}
    commands = [
        ["train", *OFFLINE, *line, f"hydra.run.dir={folder / name}"] for name, line in lines.items()
    ]
    return dict(zip(lines, run_commands(commands, timeout=600, warm=True), strict=True))


def only_run(folder: Path) -> WandbRun:
    files = files_of(folder)
    assert len(files) == 1, "one run, whatever the number of ranks"
    return read(files[0])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def logged(run: WandbRun, step: int) -> dict[str, float]:
    """All numbers of ours that were logged for a step; no number twice."""
    rows = [
        row
        for row in run.history
        if row.get("trainer/global_step") == step and "step/tokens_seen" in row
    ]
    names = [
        name
        for row in rows
        for name in row
        if name.startswith(("step/", "memory/", "router/")) and name != "step/tokens_seen"
    ]
    assert len(names) == len(set(names))
    return {name: value for row in rows for name, value in row.items()}


def test_one_run_of_four_ranks_has_everything(results: dict[str, Result], folder: Path) -> None:
    assert results["four"].code == 0, results["four"].output
    run = only_run(folder / "four")
    assert {"pp2", "dp2", "1F1B", "zero1", "mixtral", "mixtral_tiny", "fp32", "mine"} == set(
        run.tags
    )
    assert (run.project, run.name, run.exit_code) == ("lightning_3d", f"{folder.name}/four", 0)
    config = yaml.safe_load((folder / "four" / "config.yaml").read_text())
    assert (
        config["parallelism"]["layout"] == "pp2_dp2"
        and {group: run.config[group] for group in config} == config
    )
    rows = rows_of(folder / "four")
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    with_numbers = {name for row in rows for name, value in row.items() if value}
    left_out = {"mfu", "slow_rank", "slow_host", "slow_factor"}
    assert with_numbers == set(COLUMNS) - left_out, (
        "a CPU has no known peak rate; four steps are few"
    )
    for row in rows:
        told = logged(run, int(row["step"]))
        expected = {name: float(row[name]) for name in COLUMNS[1:] if row[name]}
        assert {name: told[f"step/{name}"] for name in expected} == expected
        assert told["router/aux_loss"] == pytest.approx(told["step/aux_loss"])
        assert ("memory/rank_3" in told) == bool(row["bubble"])
    told = logged(run, 4)
    assert max(told[f"memory/rank_{rank}"] for rank in range(4)) == told["step/memory"]
    loads = [value for name, value in told.items() if name.startswith("router/max_load/")]
    assert max(loads) == pytest.approx(told["step/max_load"], abs=1e-4)
    ours = {name for name in told if name.startswith(("step/", "memory/", "router/"))} - {
        "step/tokens_seen"
    }
    assert {run.drawn_over[name] for name in ours} == {"step/tokens_seen"}
    assert [int(row["tokens_seen"]) for row in rows] == [
        sum(int(each["tokens"]) for each in rows[: place + 1]) for place in range(4)
    ]


def test_a_run_that_goes_on_is_the_same_run(results: dict[str, Result], folder: Path) -> None:
    assert results["resumed"].code == 0, results["resumed"].output
    first, second = only_run(folder / "four"), only_run(folder / "resumed")
    assert second.id == first.id and second.resumes
    last = next(
        row["_step"]
        for row in first.history
        if row.get("trainer/global_step") == 2 and "step/tokens_seen" in row
    )
    steps = [row["_step"] for row in second.history]
    assert steps == sorted(set(steps)) and steps[0] > last, (
        "as one run: wandb sync leaves the steps as they are"
    )
    assert json.loads((folder / "resumed" / "wandb_run.json").read_text())["id"] == first.id
    seen = {row["step"]: row["tokens_seen"] for row in rows_of(folder / "four")}
    assert {row["step"]: row["tokens_seen"] for row in rows_of(folder / "resumed")} == {
        step: seen[step] for step in ("3", "4")
    }
    assert f"{first.id} (offline)" in (folder / "four" / "report.html").read_text()


def test_which_run_a_job_goes_on_with(
    results: dict[str, Result], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its folder, else that of its checkpoint; but a job of a sweep is a run of its own."""
    config = yaml.safe_load((folder / "resumed" / "config.yaml").read_text()) | {
        "run_folder": str(tmp_path)
    }
    first = only_run(folder / "four").id
    assert same_run(config)["wandb"]["id"] == first
    (tmp_path / "wandb_run.json").write_text('{"id": "mine"}')
    assert same_run(config)["wandb"]["id"] == "mine"
    (tmp_path / "wandb_run.json").unlink()
    monkeypatch.setenv("LIGHTNING_3D_SWEEP", "a/b")
    assert same_run(config)["wandb"]["id"] is None
    config["logger"]["wandb"]["id"] = "given"
    assert same_run(config)["wandb"]["id"] == "given"


# Refusals


def quietly(**more: str) -> dict[str, str]:
    """An environment without any key."""
    mine = {name: value for name, value in environment().items() if not name.startswith("WANDB")}
    return mine | {"HOME": "/nonexistent", "NETRC": "/nonexistent/netrc"} | more


def test_a_run_without_a_key_is_refused_before_it_starts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "lightning_3d",
        "train",
        "logger=wandb",
        "cluster=local_cpu",
        "parallelism=tp1",
        *SMALL,
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=quietly(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stderr.count("lightning_3d: ") == 1
    assert (
        "Weights & Biases has no API key for https://api.wandb.ai" in done.stderr
        and "logger.wandb.offline=true" in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_where_a_key_may_be(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no API key for https://api.wandb.ai"):
        check_access(False, "offline=true")
    check_access(True, "offline=true")
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_MODE", "disabled"),
        ("WANDB_API_KEY", "k" * 40),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            check_access(False, "offline=true")
    (nowhere / "netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    check_access(False, "offline=true")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    with pytest.raises(ConfigError, match="no API key for https://wandb.example.org"):
        check_access(False, "offline=true")
    (nowhere / "wandb").mkdir()
    (nowhere / "wandb" / "settings").write_text("[default]\nmode = offline\n")
    check_access(False, "offline=true")


def test_without_the_package(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r'pip install "lightning-3d\[wandb\]"'):
        check_access(True, "offline=true")


def test_a_new_run_that_cannot_start_is_refused(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**arguments: object) -> None:
        raise OSError("no answer")

    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setattr("wandb.init", fails)
    with pytest.raises(ConfigError, match="no answer.*logger.wandb.offline=true"):
        WandbLogger().experiment  # noqa: B018


# Model FLOPs utilization


def test_full_speed_is_that_of_all_ranks() -> None:
    """A model without attention to speak of: 6 operations for each weight in a matrix product, and
    12 for each of a head's dimensions and tokens of the context."""
    model = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = {
        "cluster": {"accelerator": "gpu", "peak_flops": {"bf16": 1e12, "fp32": None}},
        "model": {"config": model, "lora": {"r": None}},
        "precision": {"name": "bf16_mixed"},
        "trainer": {},
        "parallelism": {"layout": "tp2_dp2"},
        "data": {"sequence_length": 10},
    }
    weights = 3 * (4 * 8 * 8 + 3 * 8 * 16) + 8 * 100
    assert full_speed(config) == pytest.approx(4e12 / (6 * weights + 3 * 12 * 8 * 10))
    for other in (
        {"precision": {"name": "fp32"}},
        {"cluster": {"accelerator": "cpu"}},
        {"model": {"config": model, "lora": {"r": 8}}},
    ):
        assert full_speed(config | other) is None


@pytest.mark.full
def test_a_sweep_of_three_jobs_is_three_runs_in_one_group(tmp_path: Path) -> None:
    line = [
        "train",
        "-m",
        *OFFLINE,
        *SMALL,
        "parallelism=tp1",
        "optimizer.lr=1e-3,1e-4,1e-5",
        f"hydra.sweep.dir={tmp_path}/s/one",
    ]
    (done,) = run_commands([line], timeout=600)
    assert done.code == 0, done.output
    runs = [read(file) for file in files_of(tmp_path)]
    assert len(runs) == 3 and len({run.id for run in runs}) == 3
    assert {run.group for run in runs} == {"s/one"}
    assert {run.name for run in runs} == {"one/0", "one/1", "one/2"}
    assert {run.config["optimizer"]["lr"] for run in runs} == {1e-3, 1e-4, 1e-5}


@pytest.mark.full
def test_a_job_that_torchrun_started_goes_on_with_its_run_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    line = [*OFFLINE, *SMALL, "trainer.auto_resume=true", f"hydra.run.dir={tmp_path}/run"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(REPOSITORY / "train.py"),
    ]
    done = subprocess.run(
        [*torchrun, *line, "parallelism=dp2"],
        cwd=tmp_path,
        env=quietly(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (again,) = run_commands(
        [["train", *line, "parallelism=tp1", "trainer.max_steps=4"]], timeout=300
    )
    assert again.code == 0, again.output
    first, second = (read(file) for file in files_of(tmp_path))
    assert first.id == second.id
    assert [
        max(row.get("trainer/global_step", 0) for row in run.history) for run in (first, second)
    ] == [2, 4]
    assert logged(second, 4)["step/tokens_seen"] == 2 * logged(first, 2)["step/tokens_seen"]


SCRIPT = """
import sys
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import WandbLogger as Lightnings
from torch.utils.data import DataLoader
from own_trainer import CountingText, LanguageModel
from lightning_3d import Lightning3DStrategy
from lightning_3d.app.training.callbacks import MetricsCSV
from lightning_3d.app.training.wandb_logger import WandbLogger
kind = WandbLogger if sys.argv[1] == "ours" else Lightnings
class Fails(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 1 and len(sys.argv) > 2:
            raise ArithmeticError("on purpose")
trainer = Trainer(accelerator="cpu", devices=2, strategy=Lightning3DStrategy("pp2", micro_batch_size=2), max_steps=2,
                  log_every_n_steps=1, logger=kind(project="p", save_dir="."), callbacks=[MetricsCSV("metrics.csv"), Fails()],
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(LanguageModel(), DataLoader(CountingText(), batch_size=8))
"""  # noqa: E501


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["lightning", "torchrun", "lightnings logger", "fails"])
def test_one_run_of_a_script(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [
        "script.py",
        "lightnings" if launcher == "lightnings logger" else "ours",
        *(["fail"] if launcher == "fails" else []),
    ]
    run = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
        if launcher == "torchrun"
        else words
    )
    more = {"WANDB_MODE": "offline", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY}/examples"}
    done = subprocess.run(
        [sys.executable, *run],
        cwd=tmp_path,
        env=quietly(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == (1 if launcher == "fails" else 0), done.stderr
    run = only_run(tmp_path)
    assert run.exit_code == done.returncode
    assert set(run.tags) == (set() if launcher == "lightnings logger" else {"pp2", "1F1B", "zero0"})
    assert logged(run, 2)["step/loss"] == float(rows_of(tmp_path)[1]["loss"])


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_run_that_is_ended(number: signal.Signals, tmp_path: Path) -> None:
    """SIGKILL to rank 0, SIGTERM to the whole run: wandb's service ends, and what it wrote can be
    read; of a run that was killed the last block of 32 KiB is missing."""
    line = [
        *OFFLINE,
        *SMALL,
        "parallelism=dp2",
        "trainer.max_steps=20000",
        f"hydra.run.dir={tmp_path}/run",
    ]
    command = [sys.executable, "-m", "lightning_3d", "train", *line]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, env=quietly(), stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 240
    metrics = tmp_path / "run" / "metrics.csv"
    while (
        time.monotonic() < deadline
        and process.poll() is None
        and not (metrics.is_file() and len(metrics.read_text().splitlines()) > 5)
    ):
        time.sleep(0.2)
    everything = psutil.Process(process.pid).children(recursive=True)
    services = [child for child in everything if "wandb" in child.name()]
    assert services, (tmp_path / "log").read_text()
    (rank_0,) = {service.parent().pid for service in services if "core" in service.name()}
    os.kill(rank_0 if number == signal.SIGKILL else process.pid, number)
    code = process.wait(120)
    assert code == (1 if number == signal.SIGKILL else 128 + number), (tmp_path / "log").read_text()
    _, alive = psutil.wait_procs(everything, timeout=120)
    for each in alive:
        each.kill()
    assert not alive
    run = only_run(tmp_path / "run")
    assert run.exit_code == (None if number == signal.SIGKILL else 1) and (
        run.history or number == signal.SIGKILL
    )


def test_numbers_that_are_lost_end_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = WandbLogger(offline=True, save_dir=tmp_path)
    monkeypatch.setattr(logger.experiment, "log", lambda *args, **kwargs: 1 / 0)
    with pytest.warns(UserWarning, match="lost numbers") as warned:
        logger.log_metrics({"a": 1.0}, step=1)
        logger.log_metrics({"a": 1.0}, step=2)
    assert len([one for one in warned if "lost numbers" in str(one.message)]) == 1
    logger.close()
