"""Sweeps from the command line: what Hydra composes, what other apps get, what Optuna learns, and
whole sweeps of layouts."""

import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import REPOSITORY, Result, environment, run_commands
from processes import wait_until
from quick_runs import QUICK
from sweeps import by_default

# for the test that is first, and so waits for all command lines
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

LINES: dict[str, list[str]] = {
    "checked": ["parallelism=tp2,dp2", "-m", "trainer.dry=true"],
    "by mode": ["hydra.mode=MULTIRUN", "parallelism=tp2,dp2", "trainer.dry=true"],
    "all wrong": ["-m", "parallelism=tp3,tp5", "hydra.sweep.dir=there/it/is"],
    "schedule": [
        "-m",
        "parallelism=pp4",
        "data.global_batch_size=2",
        "parallelism.micro_batch_size=1",
        "parallelism.schedule=1f1b,gpipe",
        "trainer.dry=true",
    ],
    "no such key": ["-m", "optimizer.lrr=1,2"],
    "key of a swept group": [
        "-m",
        "recipe=llama3_1_8b_8xh100,mistral_7b_16xh200",
        "data.train_path=/x",
    ],
    "forced key": [
        "-m",
        "recipe=llama3_1_8b_8xh100,mistral_7b_16xh200",
        "++data.train_path=/x",
        "trainer.dry=true",
        "cluster=h100_1x8",
        "parallelism=dp8",
        "force=true",
    ],
    "no such model": ["-m", "model=llama_tiny,nonesuch"],
    "no such metric": ["-m", "optimizer.lr=1e-3,1e-4", "hydra.launcher.metric=losss"],
    "one folder": ["-m", "optimizer.lr=1e-3,1e-4", "hydra.sweep.subdir=same"],
    "impossible folder": ["-m", "optimizer.lr=1e-3,1e-4", "hydra.sweep.dir=/dev/null/sweep"],
    "quoted": [
        "-m",
        "+logger.note={_target_:x.Y,text:'a, b'},{_target_:x.Y,text:'c=d'}",
        "parallelism.order=[tp,cp,dp,pp]",
        "trainer.dry=true",
    ],
    "metric of no name": ["-m", "parallelism=tp2,dp2", "hydra.launcher.metric=1"],
    "no number": ["-m", "parallelism=tp2,dp2", "hydra.launcher.jobs_at_once=two"],
    "cfg": ["-m", "--cfg", "job", "parallelism=tp2,dp2"],
    "launcher of Hydra": ["-m", "hydra/launcher=basic", "parallelism=tp2,dp2", "trainer.dry=true"],
}
if importlib.util.find_spec("optuna") is not None:
    OPTUNA = [
        "-m",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "parallelism=tp3,tp5",
    ]
    LINES |= {"optuna": OPTUNA, "strict optuna": [*OPTUNA, "hydra.sweeper.max_failure_rate=0.5"]}


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    on_cpu = ["cluster=local_cpu"]
    lines = [
        ["train", *line, *(on_cpu if not any(word.startswith("cluster=") for word in line) else [])]
        for line in LINES.values()
    ]
    return dict(zip(LINES, run_commands(lines, timeout=600), strict=True))


def test_nothing_is_left_where_no_job_was_to_be_run(results: dict[str, Result]) -> None:
    assert {
        name: result.left
        for name, result in results.items()
        if result.left and name != "launcher of Hydra"
    } == {}
    assert not any(result.torch for result in results.values())
    assert not any("Traceback" in result.output for result in results.values())


@pytest.mark.parametrize("name", ["checked", "by mode"])
def test_sweep_may_be_checked_only(results: dict[str, Result], name: str) -> None:
    assert results[name].code == 0
    assert "job 0 checked: parallelism=tp2: tp2: 2 ranks on CPU" in results[name].output
    assert "job 1 checked: parallelism=dp2: dp2: 2 ranks on CPU" in results[name].output


def test_recipes_may_be_swept(results: dict[str, Result]) -> None:
    assert (
        results["forced key"].code == 0
        and results["forced key"].output.count(" checked: recipe=") == 2
    ), results["forced key"].output


def test_all_jobs_wrong(results: dict[str, Result]) -> None:
    assert results["all wrong"].code == 2
    assert results["all wrong"].output.count("does not divide 8 heads") == 2


def test_schedule_that_needs_more_micro_batches_is_skipped(results: dict[str, Result]) -> None:
    output = results["schedule"].output
    assert (
        "job 0 skipped: parallelism.schedule=1f1b: The schedule 1F1B needs at least as many"
        " micro-batches" in output
    )
    assert "job 1 checked: parallelism.schedule=gpipe" in output and results["schedule"].code == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no such key",
            'There is no configuration key "optimizer.lrr". Did you mean "optimizer.lr"?',
        ),
        (
            "key of a swept group",
            "If the key belongs to recipe, which this sweep varies, use ++KEY=VALUE.",
        ),
        ("no such model", 'There is no model "nonesuch".'),
        ("no such metric", 'got "losss". Did you mean "loss"?'),
        ("metric of no name", "hydra.launcher.metric must be loss, val_loss, "),
        ("no number", "hydra.launcher.jobs_at_once must be a whole number; got 'two'."),
        ("one folder", "Set hydra.sweep.subdir to a name that differs between jobs"),
        (
            "impossible folder",
            (
                "Cannot use the sweep folder /dev/null/sweep: Not a directory. Set hydra.sweep.dir"
                " to another"
            ),
        ),
        ("cfg", "Only one of --run, --multirun, --cfg"),
    ],
)
def test_mistakes_in_the_command_are_one_message(
    results: dict[str, Result], name: str, message: str
) -> None:
    assert results[name].code == 2
    assert results[name].output.count("lightning_3d: ") == 1 and message in results[name].output, (
        results[name].output
    )


def test_values_with_quotes_and_lists(results: dict[str, Result]) -> None:
    assert results["quoted"].code == 0, results["quoted"].output
    assert results["quoted"].output.count("checked: logger.note={_target_:x.Y,text:") == 2


def test_launcher_may_be_hydras_own(results: dict[str, Result]) -> None:
    done = results["launcher of Hydra"]
    assert done.code == 0 and done.output.count("2 ranks on CPU") == 2


# Other people's apps

APP = """
import os
import hydra
from hydra.core.hydra_config import HydraConfig

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    print(config, HydraConfig.get().runtime.output_dir == os.path.dirname(os.path.realpath("/proc/self/fd/1")))
    print("group", os.environ["WANDB_RUN_GROUP"])
    if config.x == 2:
        raise ValueError("x is two")

main()
"""  # noqa: E501


@pytest.mark.parametrize("twice", by_default([False, True], 0))
def test_other_apps_run_their_own_function_in_fresh_processes(twice: bool, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(
        "x: 1\ny: ${x}\ntext: a\nnumber: ${hydra:job.num}\n"
    )
    (tmp_path / "app.py").write_text(APP)
    options = [
        "hydra/launcher=lightning_3d",
        "hydra.sweep.dir=s",
        "hydra.sweep.subdir=${hydra.job.override_dirname}",
    ]
    command = [sys.executable, "app.py", "-m", "x=1,2", "text='a b, c'", *options]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1 and "job 1 failed: ValueError: x is two" in done.stdout, (
        done.stdout + done.stderr
    )
    with (tmp_path / "s" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["x"], row["status"]) for row in rows] == [("1", "finished"), ("2", "failed")]
    said = (Path(rows[0]["folder"]) / "job.log").read_text().splitlines()
    assert said == [
        "{'x': 1, 'y': 1, 'text': 'a b, c', 'number': 0} True",
        f"group {tmp_path.name}/s",
    ]
    assert yaml.safe_load((Path(rows[1]["folder"]) / ".hydra" / "overrides.yaml").read_text()) == [
        "x=2",
        "text='a b, c'",
    ]
    if twice:
        again = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert "had already finished" in again.stdout and "[1/1] job 1" in again.stdout


def test_basic_launcher_stays_the_default_of_other_apps(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra\n@hydra.main(version_base='1.3')\ndef main(config):\n   "
        " print('here')\nmain()\n"
    )
    command = [sys.executable, "app.py", "-m", "+x=1,2"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (
        done.returncode == 0
        and done.stdout.count("here") == 2
        and "job" not in done.stdout.replace("jobs locally", "")
    )


# Optuna

has_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="the extra optuna is not installed"
)


@has_optuna
@pytest.mark.full
@pytest.mark.timeout(600)
def test_optuna_is_told_the_results_and_goes_on_after_invalid_trials(tmp_path: Path) -> None:
    options = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=1",
        "hydra/sweeper/sampler=random",
    ]
    options.append("hydra.sweeper.sampler.seed=1")  # draws tp3, dp1, tp1
    line = [
        "train",
        "-m",
        *QUICK[1:],
        *options,
        "parallelism=dp1,tp3,tp1",
        "cluster=local_cpu",
        f"hydra.sweep.dir={tmp_path / 's'}",
    ]
    (done,) = run_commands([line], timeout=500, warm=True)
    assert done.code == 0, done.output
    with (tmp_path / "s" / "sweep.csv").open() as file:
        rows = {row["parallelism"]: row for row in csv.DictReader(file)}
    assert {name: row["status"] for name, row in rows.items()} == {
        "dp1": "finished",
        "tp3": "skipped",
        "tp1": "finished",
    }
    best = yaml.safe_load((tmp_path / "s" / "optimization_results.yaml").read_text())
    assert best["best_value"] == min(float(rows[name]["val_loss"]) for name in ("dp1", "tp1"))


@has_optuna
@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("optuna", 2, "no job of this sweep has finished"),
        ("strict optuna", 1, "the sweeper stopped"),
    ],
)
def test_optuna_with_no_valid_trial_ends_in_a_message(
    results: dict[str, Result], name: str, code: int, message: str
) -> None:
    done = results[name]
    assert done.code == code and message in done.output and "Traceback" not in done.output, (
        done.output
    )
    assert done.left == []


@has_optuna
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_search_goes_on_after_a_trial_whose_loss_is_nan(tmp_path: Path) -> None:
    options = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    ]
    options += [
        "optimizer.lr=choice(1e-3,1e25)",
        "trainer.nonfinite=ignore",
        "optimizer.scheduler.warmup_steps=0",
    ]
    line = [
        "train",
        "-m",
        *QUICK[1:],
        *options,
        "parallelism=dp1",
        "cluster=local_cpu",
        "trainer.max_steps=3",
    ]
    (done,) = run_commands([[*line, f"hydra.sweep.dir={tmp_path / 's'}"]], timeout=500, warm=True)
    assert done.code in (0, 1) and "Traceback" not in done.output, done.output
    with (tmp_path / "s" / "sweep.csv").open() as file:
        assert "nan" in [row["val_loss"] for row in csv.DictReader(file)], "seed 1 draws 1e25 first"


# Whole sweeps

LAYOUTS = ["tp2_pp2_dp2", "pp4_dp2", "dp8", "tp4_dp2", "tp8", "pp2_dp4"]
SMALL = [
    *(
        line
        for line in QUICK[1:]
        if "batch_size" not in line and "layers" not in line and "head_dim" not in line
    )
]
SIX = [
    *SMALL,
    "model.config.num_hidden_layers=4",
    "model.config.head_dim=4",
    "data.global_batch_size=16",
    "parallelism.micro_batch_size=2",
]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_sweep_of_six_layouts_killed_half_way_and_started_again(tmp_path: Path) -> None:
    """Six complete run folders with equal losses, one table; what had finished when the sweep was
    killed is not run again."""
    sweep = tmp_path / "sweep"
    overrides = [
        *SIX,
        f"parallelism={','.join(LAYOUTS)}",
        "cluster=local_cpu",
        f"hydra.sweep.dir={sweep}",
    ]
    command = [sys.executable, str(REPOSITORY / "train.py"), "-m", *overrides]
    first = subprocess.Popen(
        command, env=environment(), cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL
    )
    assert wait_until(
        lambda: (sweep / "2" / "metrics.csv").is_file() and (sweep / "1" / "status.json").is_file(),
        1200,
    )
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert wait_until(lambda: not _processes_in(sweep), 30), "no rank outlives the sweep"
    finished = {job: (sweep / job / "status.json").stat().st_mtime_ns for job in "01"}
    again = subprocess.run(
        command,
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=2400,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count(" had already finished: ") == 2 and "[4/4] job 5" in again.stdout
    assert "job 2 did not finish last time and restarts" in again.stdout
    assert {job: (sweep / job / "status.json").stat().st_mtime_ns for job in "01"} == finished
    with (sweep / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["parallelism"] for row in rows] == LAYOUTS and {row["status"] for row in rows} == {
        "finished"
    }
    for name in ("loss", "val_loss"):
        values = [float(row[name]) for row in rows]
        assert max(values) - min(values) <= 1e-5 * max(values), f"{name}: {values}"
    for row in rows:
        names = {path.name for path in Path(row["folder"]).iterdir()}
        assert {
            "config.yaml",
            "metrics.csv",
            "checkpoints",
            "logs",
            "status.json",
            "job.log",
            ".hydra",
        } <= names
    table = again.stdout.rpartition("status")[2]
    assert all(layout in table for layout in LAYOUTS), again.stdout


def _processes_in(folder: Path) -> list[int]:
    """Processes whose command line names a folder; ranks that were forked keep that of their
    parent."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and int(entry.name) != os.getpid()
                and str(folder) in (entry / "cmdline").read_text()
            ):
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile
            continue
    return found


@pytest.mark.full  # by default a sweep of commands is interrupted, in test_sweep.py
@pytest.mark.timeout(600)
def test_interrupt_ends_the_job_and_the_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    overrides = [
        *QUICK[1:],
        "trainer.max_steps=4000",
        "parallelism=dp1,tp1",
        "cluster=local_cpu",
        f"hydra.sweep.dir={sweep}",
    ]
    command = [sys.executable, str(REPOSITORY / "train.py"), "-m", *overrides]
    process = subprocess.Popen(
        command,
        env=environment(),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert wait_until(lambda: (sweep / "0" / "metrics.csv").is_file(), 300)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    with (sweep / "sweep.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["interrupted", "not started"]
    assert "interrupted" in output and "to run the jobs that did not finish" in output
    assert _processes_in(sweep) == []


def test_sweep_that_is_ended_while_it_is_composed_leaves_nothing(tmp_path: Path) -> None:
    layouts = ",".join(f"tp{degree}" for degree in range(9, 309))
    command = [
        sys.executable,
        str(REPOSITORY / "train.py"),
        "-m",
        f"parallelism={layouts}",
        "hydra.sweep.dir=a/sweep",
    ]
    process = subprocess.Popen(
        command, env=environment(), cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert wait_until(lambda: (tmp_path / "a" / "sweep" / "multirun.yaml").is_file(), 120)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert list(tmp_path.iterdir()) == []
