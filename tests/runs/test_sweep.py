"""Sweeps without training: planning, skipping, the table, beginning again, and how jobs end, with
jobs that are a line of shell."""

import contextlib
import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import environment
from omegaconf import OmegaConf
from processes import is_running, wait_until

from hydra_plugins.lightning_3d_launcher.launcher import Lightning3DLauncher
from lightning_3d.app.runs.frozen_config import frozen_text
from lightning_3d.app.runs.status import RunStatus, read_status
from lightning_3d.app.runs.sweep import local_engine as engine
from lightning_3d.app.runs.sweep.folder import SweepFolder
from lightning_3d.app.runs.sweep.jobs import Checked, Entry, SkippedJob, SweepJob
from lightning_3d.app.runs.sweep.local_engine import (
    Began,
    Ended,
    Event,
    Going,
    Interrupted,
    LocalEngine,
    interruptible,
)
from lightning_3d.app.runs.sweep.results import (
    JobOutcome,
    check_metric,
    read_numbers,
    reason_in_log,
)
from lightning_3d.app.runs.sweep.sweep import Sweep, format_table, swept_keys
from lightning_3d.errors import ConfigError

METRICS = "step,loss,grad_norm,lr,tokens,tokens_per_second,step_seconds,val_loss\n"


def job(sweep: Path, number: int, script: str = "exit 0", **config: object) -> SweepJob:
    """A job that is a line of shell, run in its folder."""
    folder = sweep / str(number)
    frozen = {"run_folder": str(folder), "number": number, **config}
    return SweepJob(
        number,
        (f"number={number}", "fixed=1"),
        folder,
        frozen,
        ("sh", "-c", f"cd '{folder}'; {script}"),
    )


def run(sweep: Path, entries: Sequence[Entry]) -> tuple[Sweep, str]:
    """A whole sweep on this machine, and what it prints."""
    out = io.StringIO()
    done = Sweep(SweepFolder.take(sweep, numbered=False), LocalEngine(), out=out)
    try:
        done.run(entries)
    finally:
        done.close()
    return done, out.getvalue()


def statuses(sweep: Sweep) -> list[str]:
    return [outcome.status for outcome in sweep.outcomes.values()]


def table(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


# What runs, what does not


def test_every_job_runs_and_a_failed_one_stops_no_other(tmp_path: Path) -> None:
    done, said = run(
        tmp_path / "s",
        [
            job(tmp_path / "s", 0),
            job(tmp_path / "s", 1, "echo why; exit 3"),
            job(tmp_path / "s", 2),
        ],
    )
    assert statuses(done) == ["finished", "failed", "finished"]
    assert done.exit_code == 1
    assert [row["exit_code"] for row in table(tmp_path / "s")] == ["0", "3", "0"]
    assert table(tmp_path / "s")[1]["reason"] == "why" and "exit code 3: why" in said


def test_what_cannot_run_is_said_before_the_first_job_starts(tmp_path: Path) -> None:
    done, said = run(
        tmp_path / "s",
        [job(tmp_path / "s", 0), SkippedJob(1, ("number=1", "fixed=1"), "tp 3 does not fit.")],
    )
    assert said.index("job 1 skipped: number=1: tp 3 does not fit.") < said.index(
        "[1/1] job 0: number=0"
    )
    assert done.exit_code == 0 and table(tmp_path / "s")[1]["reason"] == "tp 3 does not fit."


def test_sweep_without_a_valid_job_leaves_nothing(tmp_path: Path) -> None:
    done, said = run(
        tmp_path / "a" / "s",
        [SkippedJob(0, ("x=1",), "wrong"), SkippedJob(1, ("x=2",), "wrong too")],
    )
    assert done.exit_code == 2 and "wrong too" in said
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_are_only_checked_leave_nothing(tmp_path: Path) -> None:
    done, said = run(tmp_path / "s", [Checked(0, ("x=1",), "dp2: 2 ranks")])
    assert done.exit_code == 0 and "dp2: 2 ranks" in said
    assert list(tmp_path.iterdir()) == []


def test_jobs_do_not_share_folders(tmp_path: Path) -> None:
    one = job(tmp_path / "s", 0)
    other = SweepJob(1, one.overrides, one.folder, one.config, one.command)
    with pytest.raises(
        ConfigError, match="Jobs 0 and 1 would both write into .*Set hydra.sweep.subdir"
    ):
        run(tmp_path / "s", [one, other])
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_one_jobs_problem(tmp_path: Path) -> None:
    long = SweepJob(1, ("number=1",), tmp_path / "s" / ("x" * 300), {}, ("true",))
    done, said = run(tmp_path / "s", [job(tmp_path / "s", 0), long])
    assert statuses(done) == ["finished", "skipped"] and "File name too long" in said


def test_environment_and_working_folder_of_a_job(tmp_path: Path) -> None:
    plain = job(tmp_path / "s", 0)
    command = ("sh", "-c", "echo $WORD; pwd")
    where = SweepJob(
        0,
        (),
        plain.folder,
        plain.config,
        command,
        environment={"WORD": "a word"},
        work_folder=tmp_path,
    )
    run(tmp_path / "s", [where])
    assert where.log.read_text() == f"a word\n{tmp_path}\n"


# Beginning again


def test_finished_jobs_are_not_run_again(tmp_path: Path) -> None:
    entries = [
        job(tmp_path / "s", 0, "echo x >> count"),
        job(tmp_path / "s", 1, "echo x >> count; test -f ../go"),
    ]
    first, said = run(tmp_path / "s", entries)
    assert statuses(first) == ["finished", "failed"]
    assert (
        "to run the jobs that did not finish, repeat the command with"
        f" hydra.sweep.dir={tmp_path / 's'}" in said
    )
    (tmp_path / "s" / "go").touch()
    again, said = run(tmp_path / "s", entries)
    assert statuses(again) == ["finished", "finished"] and again.exit_code == 0
    assert (
        "job 0 (number=0) had already finished" in said
        and "job 1 did not finish last time and restarts" in said
    )
    assert (tmp_path / "s" / "0" / "count").read_text() == "x\n"
    assert (tmp_path / "s" / "1" / "count").read_text() == "x\n", "it began in an empty folder"
    assert (tmp_path / "s" / "earlier" / "1" / "count").read_text() == "x\n", "nothing is lost"
    third, _ = run(tmp_path / "s", [*entries, job(tmp_path / "s", 2)])
    assert [outcome.before for outcome in third.outcomes.values()] == [True, True, False]


@pytest.mark.parametrize(("status", "code"), [("failed", 1), ("interrupted", 130)])
def test_job_that_left_another_status_than_finished_is_run_again(
    status: str, code: int, tmp_path: Path
) -> None:
    """As `lightning-3d train` leaves it: jobs write status.json themselves."""
    left = json.dumps(asdict(RunStatus(status, code, 1.0, 2.0, 1, "host", "no memory")))
    script = f"echo x >> count; test -f ../go || {{ echo '{left}' > status.json; exit {code}; }}"
    first, _ = run(tmp_path / "s", [job(tmp_path / "s", 0, script)])
    assert statuses(first) == [status]
    (tmp_path / "s" / "go").touch()
    again, said = run(tmp_path / "s", [job(tmp_path / "s", 0, script)])
    assert statuses(again) == ["finished"] and "job 0 did not finish last time and restarts" in said


def test_finished_job_of_another_sweep_is_refused_and_kept(tmp_path: Path) -> None:
    run(tmp_path / "s", [job(tmp_path / "s", 0, lr=0.1)])
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(
        ConfigError, match="holds a finished run with another configuration: now lr=0.2"
    ):
        run(tmp_path / "s", [job(tmp_path / "s", 0, lr=0.2)])
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_sweep_that_was_moved_is_found_finished(tmp_path: Path) -> None:
    old = job(
        tmp_path / "old",
        0,
        callbacks={"metrics": {"path": str(tmp_path / "old" / "0" / "metrics.csv")}},
    )
    run(tmp_path / "old", [old])
    (tmp_path / "old").rename(tmp_path / "new")
    new = job(
        tmp_path / "new",
        0,
        callbacks={"metrics": {"path": str(tmp_path / "new" / "0" / "metrics.csv")}},
    )
    done, _ = run(tmp_path / "new", [new])
    assert done.outcomes[0].before


def test_run_that_goes_on_is_not_started_twice(tmp_path: Path) -> None:
    entry = job(tmp_path / "s", 0)
    entry.folder.mkdir(parents=True)
    RunStatus.begun().write(entry.folder)
    with pytest.raises(
        ConfigError, match=f"belongs to a run that is in progress .process {os.getpid()} "
    ):
        run(tmp_path / "s", [entry])


def test_run_that_was_killed_begins_again(tmp_path: Path) -> None:
    entry = job(tmp_path / "s", 0)
    entry.folder.mkdir(parents=True)
    dead = subprocess.Popen(["true"])
    dead.wait()
    RunStatus("running", None, 0.0, None, dead.pid, RunStatus.begun().host).write(entry.folder)
    done, _ = run(tmp_path / "s", [entry])
    assert statuses(done) == ["finished"] and (tmp_path / "s" / "earlier" / "0").is_dir()


def test_run_that_resumes_by_itself_keeps_what_it_left(tmp_path: Path) -> None:
    """Unless the job is another one by now."""
    script = "test -e checkpoint || { touch checkpoint; exit 1; }"
    for seed, expected in ((0, "failed"), (0, "finished"), (1, "failed")):
        done, _ = run(
            tmp_path / "s",
            [job(tmp_path / "s", 0, script, trainer={"auto_resume": True}, seed=seed)],
        )
        assert statuses(done) == [expected], seed
        (tmp_path / "s" / "0" / "status.json").unlink(missing_ok=True)
    assert (tmp_path / "s" / "earlier" / "0" / "checkpoint").exists()


def test_prepared_folder_that_was_never_started_is_used(tmp_path: Path) -> None:
    entry = job(tmp_path / "s", 0)
    entry.folder.mkdir(parents=True)
    (entry.folder / "config.yaml").write_text(frozen_text(entry.config))
    done, _ = run(tmp_path / "s", [entry])
    assert statuses(done) == ["finished"] and not (tmp_path / "s" / "earlier").exists()


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path) -> None:
    first = SweepFolder.take(tmp_path / "s", numbered=False)
    with pytest.raises(ConfigError, match="Another sweep is in progress in"):
        SweepFolder.take(tmp_path / "s", numbered=False)
    second = SweepFolder.take(tmp_path / "s", numbered=True)
    assert second.path == tmp_path / "s_1"
    first.close(used=True)
    SweepFolder.take(tmp_path / "s", numbered=False).close(used=False)


def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match="Cannot use the sweep folder .*: (File exists|Not a directory). Set hydra.sweep.dir",
    ):
        SweepFolder.take(tmp_path / "file", numbered=False)
    with pytest.raises(ConfigError, match="Not a directory"):
        SweepFolder.take(tmp_path / "file" / "s", numbered=False)


# How jobs end


def test_killed_job_is_named(tmp_path: Path) -> None:
    done, _ = run(tmp_path / "s", [job(tmp_path / "s", 0, "kill -9 $$")])
    assert (done.outcomes[0].exit_code, done.outcomes[0].status) == (137, "failed")
    assert "SIGKILL" in done.outcomes[0].reason


def test_command_that_does_not_exist_fails_its_job_only(tmp_path: Path) -> None:
    plain = job(tmp_path / "s", 0)
    wrong = SweepJob(0, ("number=0",), plain.folder, plain.config, ("/no/such/program",))
    done, said = run(tmp_path / "s", [wrong, job(tmp_path / "s", 1)])
    assert (
        statuses(done) == ["failed", "finished"]
        and "cannot start /no/such/program: No such file or directory." in said
    )


def test_jobs_at_once(tmp_path: Path) -> None:
    """Each waits for the other to have begun."""
    meet = "touch ../here_$0; while ! test -f ../here_{}; do sleep 0.05; done"
    entries = [
        job(tmp_path, 0, meet.format(1).replace("$0", "0")),
        job(tmp_path, 1, meet.format(0).replace("$0", "1")),
    ]
    for entry in entries:
        entry.folder.mkdir()
    ended = [event for event in LocalEngine(at_once=2).run(entries) if isinstance(event, Ended)]
    assert [event.exit_code for event in ended] == [0, 0]
    with pytest.raises(ConfigError, match="jobs_at_once must be at least 1; got 0"):
        LocalEngine(0)


def test_closed_engine_ends_its_jobs(tmp_path: Path) -> None:
    entry = job(tmp_path, 0, "echo $$ > pid; sleep 600")
    entry.folder.mkdir()
    with contextlib.closing(LocalEngine().run([entry])) as events:
        for event in events:
            if isinstance(event, Going) and (entry.folder / "pid").exists():
                break
    pid = int((entry.folder / "pid").read_text())
    assert wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("number", "repeated"), [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)]
)
def test_f51_a_job_has_time_to_save_after_one_signal(
    number: int, repeated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_END_SECONDS", 0.2)
    entry = job(
        tmp_path,
        0,
        "trap 'sleep 1; touch saved; exit' TERM INT; touch up; while true; do sleep 0.1; done",
    )
    entry.folder.mkdir()
    events = LocalEngine().run([entry])
    while not (entry.folder / "up").exists():
        next(events)
    error = Interrupted(number)
    error.repeated = repeated
    with pytest.raises(Interrupted):
        events.throw(error)
    assert (entry.folder / "saved").exists() != repeated


def test_a_second_signal_is_noted() -> None:
    with pytest.raises(Interrupted) as end, interruptible():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
    assert end.value.repeated


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_terminal_shows_the_last_line_of_the_running_job(tmp_path: Path) -> None:
    out = Terminal()
    sweep = Sweep(SweepFolder.take(tmp_path / "s", numbered=False), LocalEngine(), out=out)
    sweep.run([job(tmp_path / "s", 0, "printf 'old\\rstep 7 | loss 2\\n'; sleep 1.5")])
    assert "\r      job 0 | step 7 | loss 2" in out.getvalue() and "old" not in out.getvalue()
    assert "\n      job 0 finished" in out.getvalue().replace("\r", "\n")


class InterruptedEngine:
    """The first job finishes, a signal comes in the second."""

    def run(self, jobs: Sequence[SweepJob]) -> Generator[Event, None, None]:
        yield Began(jobs[0])
        yield Ended(jobs[0], 0)
        yield Began(jobs[1])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
        raise AssertionError("the signal did not interrupt")


def test_signal_ends_the_sweep_with_a_table_of_what_was_done(tmp_path: Path) -> None:
    out = io.StringIO()
    sweep = Sweep(SweepFolder.take(tmp_path / "s", numbered=False), InterruptedEngine(), out=out)
    with pytest.raises(Interrupted) as end, interruptible():
        sweep.run([job(tmp_path / "s", number) for number in range(3)])
    assert end.value.exit_code == 143
    assert statuses(sweep) == ["finished", "interrupted", "not started"]
    assert [row["status"] for row in table(tmp_path / "s")] == [
        "finished",
        "interrupted",
        "not started",
    ]
    sweep.close()
    assert "to run the jobs that did not finish" in out.getvalue()


KILLED = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_sweep import job, run
sweep = Path(sys.argv[1])
run(sweep, [job(sweep, 0, "echo $$ > pid; sleep 600")])
"""


def test_job_dies_with_a_sweep_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "s"), str(Path(__file__).parent)]
    process = subprocess.Popen(command, env=environment())
    pid_file = tmp_path / "s" / "0" / "pid"
    assert wait_until(lambda: pid_file.is_file() and pid_file.read_text().strip() != "", 60)
    pid = int(pid_file.read_text())
    assert is_running(pid)
    process.kill()
    process.wait()
    assert wait_until(lambda: not is_running(pid))
    SweepFolder.take(tmp_path / "s", numbered=False).close(used=True)  # the lock went with it


# Numbers and the table


def test_the_reason_of_a_failed_job_is_the_one_in_its_status(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "0"
    reason = (
        "lightning_3d: rank 1 of 2 failed:\nTraceback (most recent call last):\nRuntimeError: no"
    )
    status = json.dumps(asdict(RunStatus.begun().after(1, reason)))
    script = (
        f"printf %s '{status}' > status.json; echo 'lightning_3d: the run failed after step 3 of"
        " 9'; exit 1"
    )
    done, printed = run(tmp_path / "s", [job(tmp_path / "s", 0, script)])
    assert folder.is_dir() and done.outcomes[0].reason == "rank 1 of 2 failed: RuntimeError: no"
    assert (
        "RuntimeError: no" in printed
        and table(tmp_path / "s")[0]["reason"] == done.outcomes[0].reason
    )


def test_numbers_of_a_run(tmp_path: Path) -> None:
    rows = "1,5.5,1,1e-3,64,10,6.0,\n2,4.5,2,1e-3,64,100,0.5,4.4\n3,4.0,3,1e-3,64,300,0.3,\n4,3.5,4,1e-3,64,200,0.4,3.25\n5,3."  # noqa: E501
    (tmp_path / "metrics.csv").write_text(METRICS + rows)
    RunStatus("finished", 0, 100.0, 112.5, 1, "host").write(tmp_path)
    numbers = read_numbers(tmp_path)
    assert numbers == {
        "loss": 3.5,
        "val_loss": 3.25,
        "grad_norm": 4,
        "tokens_per_second": 200,
        "step_seconds": 0.4,
        "seconds": 12.5,
    }
    outcome = JobOutcome(0, (), "finished", numbers=numbers)
    assert (outcome.objective(None), outcome.objective("loss"), outcome.objective("seconds")) == (
        3.25,
        3.5,
        12.5,
    )
    assert JobOutcome(0, (), "finished", numbers={"loss": 1.0}).objective(None) == 1.0
    assert read_numbers(tmp_path / "nothing") == {}


def test_metric_that_does_not_exist() -> None:
    check_metric("tokens_per_second")
    with pytest.raises(ConfigError, match='got "losss". Did you mean "loss"'):
        check_metric("losss")


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("lightning_3d: There is no checkpoint x.\n", "There is no checkpoint x."),
        (
            (
                "step 1\nlightning_3d: rank 1 of 2 failed:\nTraceback\n  File\nValueError:"
                " no\nlightning_3d: the output of the ranks is in x\n"
            ),
            "rank 1 of 2 failed: ValueError: no",
        ),
        ("lightning_3d: A step has 2 micro-batches\nKilled\n", "Killed"),
        (
            (
                "Could not override 'trainer.steps'.\nKey 'steps' is not in struct\n    full_key:"
                " trainer.steps\n    object_type=dict\n\nSet the environment variable"
                " HYDRA_FULL_ERROR=1 for a complete stack trace.\n"
            ),
            "Key 'steps' is not in struct",
        ),
        ("", ""),
    ],
)
def test_reason_is_read_from_what_a_job_printed(log: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(log)
    assert reason_in_log(tmp_path / "job.log") == reason


def test_swept_keys_are_columns() -> None:
    outcomes = [
        JobOutcome(n, ("+a.x=1", f"b.lr={n}", "c=[1,2]", f"d.lr={n}"), "finished") for n in range(2)
    ]
    assert swept_keys(outcomes) == ["b.lr", "d.lr"]
    assert swept_keys(outcomes[:1], known=["a.x"]) == ["a.x"]


def test_table_is_aligned_and_fits() -> None:
    outcomes = [
        JobOutcome(
            0,
            ("parallelism=tp2_pp2_dp2_with_a_long_name", "optimizer.lr=1e-3"),
            "finished",
            numbers={"loss": 2.5, "seconds": 3725},
        ),
        JobOutcome(11, ("parallelism=dp8", "optimizer.lr=1e-4"), "skipped", reason="no"),
    ]
    wide = format_table(outcomes, ["parallelism", "optimizer.lr"], 200).splitlines()
    assert wide[1].split() == ["job", "parallelism", "lr", "status", "loss", "time"]
    assert wide[3].split() == [
        "0",
        "tp2_pp2_dp2_with_a_long_name",
        "1e-3",
        "finished",
        "2.50000",
        "1:02:05",
    ]
    assert wide[3].index("finished") == wide[4].index("skipped") == wide[1].index("status")
    narrow = format_table(outcomes, ["parallelism", "optimizer.lr"], 50)
    assert max(len(line) for line in narrow.splitlines()) <= 50 and "…" in narrow


def test_status_is_kept_for_commands_that_keep_none(tmp_path: Path) -> None:
    run(tmp_path / "s", [job(tmp_path / "s", 0)])
    status = read_status(tmp_path / "s" / "0")
    assert status is not None and status.status == "finished"


def test_a_signal_that_a_library_swallows_ends_the_sweep_all_the_same() -> None:
    with (
        pytest.raises(Interrupted, match="SIGTERM"),
        interruptible(),
        contextlib.suppress(BaseException),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)


def test_a_closed_terminal_does_not_end_a_sweep_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


# What a sweeper gets


@pytest.mark.parametrize(
    ("value", "usable"), [(1.5, True), (math.nan, False), (math.inf, False), (None, False)]
)
def test_a_result_that_cannot_be_compared_is_a_failure_for_a_sweeper(
    value: float | None, usable: bool
) -> None:
    outcome = JobOutcome(
        0, ("x=1",), "finished", 0, numbers={} if value is None else {"val_loss": value}
    )
    for sweeper, status in (
        ("optuna.OptunaSweeper", "COMPLETED" if usable else "FAILED"),
        ("hydra.BasicSweeper", "COMPLETED"),
    ):
        launcher = Lightning3DLauncher()
        launcher._config = OmegaConf.create(
            {"hydra": {"job": {"name": "x"}, "sweeper": {"_target_": sweeper}}}
        )
        launcher._sweep, launcher._ours = SimpleNamespace(has_results=False), True  # type: ignore[assignment]
        assert launcher._returned(outcome, None).status.name == status
        assert launcher._sweep.has_results == (status == "COMPLETED")
