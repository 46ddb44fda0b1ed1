"""`lightning-3d run`: trains from a complete configuration, in a folder that was prepared for it or
in a new one."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import Result, environment, run_commands
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import OmegaConf
from quick_runs import FAULTY, QUICK, losses

from lightning_3d.app.cli import train
from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.runs.folder import RunFolder
from lightning_3d.app.runs.frozen_config import frozen_text, move_to, read_frozen
from lightning_3d.app.runs.status import RunStatus, read_status
from lightning_3d.app.training import job
from lightning_3d.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def prepare(folder: Path, *overrides: str) -> Path:
    """A folder with a frozen configuration that names it, as a sweep leaves it for its jobs."""
    folder.mkdir(parents=True)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", overrides=[*QUICK, "cluster=local_cpu", *overrides])
    config.run_folder = str(folder)
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    frozen = plan_run(config).freeze({str(key): value for key, value in plain.items()})
    (folder / "config.yaml").write_text(frozen_text(frozen))
    return folder / "config.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("frozen")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Result]:
    prepared = prepare(folder / "prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_3D_ALLOW_TARGETS", "faulty")
        failing = prepare(folder / "failing", *FAULTY)
    no_data = prepare(folder / "no_data", "data.root=/nonexistent/folder")
    lines = {
        "train": ["train", *QUICK, f"hydra.run.dir={folder / 'train'}"],
        "prepared": ["run", str(prepared)],
        "again": ["run", str(prepared)],
        "repeated": [
            "run",
            str(folder / "train" / "config.yaml"),
            "--folder",
            str(folder / "repeated"),
        ],
        "into another": [
            "run",
            str(folder / "train" / "config.yaml"),
            "--folder",
            str(folder / "prepared"),
        ],
        "failing": ["run", str(failing)],
        "no_data": ["run", str(no_data)],
    }
    # a frozen configuration may not name it by itself
    allow = {"LIGHTNING_3D_ALLOW_TARGETS": "faulty"}
    return dict(
        zip(lines, run_commands(list(lines.values()), timeout=500, warm=True, **allow), strict=True)
    )


def test_prepared_folder_is_trained_in_like_the_composed_run(
    results: dict[str, Result], folder: Path
) -> None:
    assert results["prepared"].code == 0, results["prepared"].output
    assert losses(folder / "prepared") == losses(folder / "train")
    assert results["prepared"].left == []


def test_prepared_folder_is_taken_once(results: dict[str, Result], folder: Path) -> None:
    again = results["again"]
    assert again.code == 2
    assert (
        again.output
        == f"lightning_3d: {folder / 'prepared'} already holds a run (status: finished). To repeat"
        " it in a new folder, use --folder NEW.\n"
    )
    assert (
        results["into another"].code == 2
        and "Set --folder to a new folder" in results["into another"].output
    )


def test_run_is_repeated_in_a_new_folder(results: dict[str, Result], folder: Path) -> None:
    assert results["repeated"].code == 0, results["repeated"].output
    assert losses(folder / "repeated") == losses(folder / "train")
    names = {path.name for path in (folder / "repeated").iterdir()}
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
    assert names == {*files, ".lock", ".run.json"}
    assert str(folder / "train") not in (folder / "repeated" / "config.yaml").read_text()


def test_status_tells_how_a_run_ended(results: dict[str, Result], folder: Path) -> None:
    assert results["failing"].code == 1
    ends = {name: read_status(folder / name) for name in ("train", "prepared", "failing")}
    assert {name: (end.status, end.exit_code) for name, end in ends.items() if end} == {
        "train": ("finished", 0),
        "prepared": ("finished", 0),
        "failing": ("failed", 1),
    }
    assert all(end and end.seconds and end.seconds > 0 for end in ends.values())


def test_refused_run_leaves_the_prepared_folder_as_it_was(
    results: dict[str, Result], folder: Path
) -> None:
    assert results["no_data"].code == 2
    assert results["no_data"].output.count("lightning_3d: ") == 1
    assert [path.name for path in (folder / "no_data").iterdir()] == ["config.yaml"]


def test_frozen_text_is_the_same_for_any_reader_of_yaml(tmp_path: Path) -> None:
    path = prepare(
        tmp_path / "run",
        "optimizer.lr=1e-5",
        "data.global_batch_size=8",
        "trainer.max_time='00:00:00:09'",
    )
    config = read_frozen(path)
    assert config == yaml.safe_load(path.read_text()) and config["optimizer"]["lr"] == 1e-5
    assert plan_run(OmegaConf.create(config)) is not None


def test_a_configuration_of_version_0_1_is_read(tmp_path: Path) -> None:
    target = "lightning_3d.training.callbacks.MetricsCSV"
    text = f"run_folder: x\ncallbacks: {{metrics: {{_target_: {target}}}}}"
    text += "\nparallelism: {layout: tp1, moe_exchange: torch}"
    (tmp_path / "config.yaml").write_text(text)
    config = read_frozen(tmp_path / "config.yaml")
    assert get_class(config["callbacks"]["metrics"]["_target_"]).__name__ == "MetricsCSV"
    assert config["parallelism"] == {"layout": "tp1"}


def test_numbers_that_the_user_wrote_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("run_folder: x\noptimizer: {lr: 1e-5}")
    assert read_frozen(tmp_path / "config.yaml")["optimizer"]["lr"] == 1e-5


def test_what_a_run_writes_moves_with_its_folder_and_what_it_reads_stays() -> None:
    config = {
        "run_folder": "/runs/a",
        "callbacks": {"metrics": {"path": "/runs/a/metrics.csv"}, "other": {"path": "/runs/ab"}},
        "data": {"root": "/runs/a/text"},
        "trainer": {
            "resume": "/runs/a/checkpoints/step_5",
            "extra": {"default_root_dir": "/runs/a"},
        },
    }
    assert move_to(config, Path("/new")) == {
        "run_folder": "/new",
        "callbacks": {"metrics": {"path": "/new/metrics.csv"}, "other": {"path": "/runs/ab"}},
        "data": {"root": "/runs/a/text"},
        "trainer": {"resume": "/runs/a/checkpoints/step_5", "extra": {"default_root_dir": "/new"}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "Cannot read the configuration .*: No such file"),
        ("a: [", "is not valid YAML"),
        ("- a", "has no run_folder"),
        ("a: 1", "has no run_folder"),
        ("run_folder: x\na: ${nothing.there}", "nothing.there"),
        (
            "run_folder: x\na: ${seed",
            "not a complete configuration of a run: .*Use the config.yaml",
        ),
        ("run_folder: x\na: ${no_such:1}", "not a complete configuration of a run: .*no_such"),
        ("run_folder: ${hydra:runtime.output_dir}", "not the one in its .hydra"),
        ("run_folder: null", "has no run_folder"),
        ("3", "has no keys"),
    ],
)
def test_what_is_no_configuration_is_refused(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_frozen(path)


def test_of_two_runs_one_takes_a_prepared_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    RunFolder.adopt(tmp_path)
    with pytest.raises(ConfigError, match=r"already holds a run \(status: running; process \d+ "):
        RunFolder.adopt(tmp_path)


def test_run_that_goes_on_keeps_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise repeating it elsewhere would go on from its last checkpoint, and a sweep would take
    it for another run."""
    path = prepare(tmp_path / "run")
    before, config = path.read_text(), read_frozen(path)
    given = []
    monkeypatch.setattr(
        job, "_start_ranks", lambda plan, frozen, folder: given.append(frozen) or (0, "")
    )
    folder = RunFolder(path.parent, (), frozenset(), "step_5")
    assert (
        job.run_job(
            config,
            plan_run(OmegaConf.create(config)),
            None,
            job.JobPlace(path.parent, "step_5", folder),
        )
        == 0
    )
    assert path.read_text() == before and given[0]["trainer"]["resume"] == "step_5"


def test_half_written_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    RunStatus.begun().write(tmp_path)
    text = (tmp_path / "status.json").read_text()
    (tmp_path / "status.json").write_text(text[: len(text) // 2])
    assert read_status(tmp_path) is None


@pytest.mark.full
def test_ranks_of_torchrun_run_a_prepared_folder(
    tmp_path: Path, results: dict[str, Result], folder: Path
) -> None:
    path = prepare(tmp_path / "run")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "lightning_3d",
        "run",
        str(path),
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == losses(folder / "train")
    status = read_status(tmp_path / "run")
    assert status is not None and status.status == "finished"


def test_a_run_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its folder is made; with parallelism=auto each check searches for the fastest
    layout."""
    checked, started = [], []
    check = train.check_for
    monkeypatch.setattr(
        train,
        "check_for",
        lambda *arguments, **more: checked.append(check(*arguments, **more)) or checked[-1],
    )
    monkeypatch.setattr(train, "run_job", lambda config, plan, *rest: started.append(plan) or 0)
    quiet = [
        "logger=none",
        "callbacks=none",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        "hydra.output_subdir=null",
    ]
    assert train.run(["parallelism=tp1", f"hydra.run.dir={tmp_path / 'run'}", *quiet], None) == 0
    assert started == checked and len(checked) == 1
