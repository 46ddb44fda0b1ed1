"""The supervisor: all ranks end together, the cause is told once, nothing is left running."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import environment
from processes import is_running, wait_until
from sweeps import by_default

from lightning_3d.errors import ConfigError, DataError
from lightning_3d.ranks import memory_kills, supervisor
from lightning_3d.ranks.boards import FOLDER_VARIABLE, FolderBoard
from lightning_3d.ranks.environment import OutsideRank, outside_rank, set_master_address
from lightning_3d.ranks.failure import Failure
from lightning_3d.ranks.supervisor import Outcome, launch

FOREVER = 600


def run(
    job: Callable[..., None],
    *arguments: Any,
    ranks: int = 3,
    logs: Path,
    fork: bool = True,
    grace: float = 1.0,
) -> Outcome:
    return launch(job, arguments, ranks, logs=logs, fork=fork, grace=grace)


def my_rank() -> int:
    return int(os.environ["RANK"])


# Jobs of the ranks


def write_place(folder: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    place = " ".join(os.environ[name] for name in names)
    (folder / f"{my_rank()}").write_text(f"{place} {os.getpid()}")
    print(f"rank {my_rank()} was here")


def raise_on(rank: int, error: BaseException) -> None:
    if my_rank() == rank:
        raise error
    time.sleep(FOREVER)


def raise_user_error() -> None:
    raise DataError("The data set is empty.")


def kill_on(rank: int, number: int) -> None:
    if my_rank() == rank:
        print("the last words of rank", rank, flush=True)
        os.kill(os.getpid(), number)
    time.sleep(FOREVER)


def leave_on(rank: int, code: int) -> None:
    if my_rank() == rank:
        os._exit(code)
    time.sleep(FOREVER)


def finish_all_the_same() -> None:
    """The signal comes when the job is as good as done."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.5)
    if my_rank() == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.5)


def peers_notice_first(cause: int) -> None:
    """The others see closed connections half a second before the rank that failed has its say."""
    if my_rank() == cause:
        time.sleep(0.5)
        raise ArithmeticError("the true cause")
    raise RuntimeError(
        "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
    )


def ignore_sigterm(folder: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"{my_rank()}").write_text(str(os.getpid()))
    if my_rank() == 0:
        wait_until(lambda: len(list(folder.iterdir())) == 3)
        raise RuntimeError("rank 0 gives up")
    time.sleep(FOREVER)


def start_child(folder: Path) -> None:
    child = subprocess.Popen(["sleep", str(FOREVER)])
    (folder / f"{my_rank()}").write_text(str(child.pid))
    if my_rank() == 0:
        wait_until(lambda: len(list(folder.iterdir())) == 3)
        raise RuntimeError("rank 0 gives up")
    time.sleep(FOREVER)


def hang_after_post() -> None:
    """A rank that posted its failure and then never ends, as in a teardown that waits for
    others."""
    board = FolderBoard(Path(os.environ[FOLDER_VARIABLE]))
    if my_rank() == 1:
        board.post(Failure.of(ValueError("posted"), 1))
    time.sleep(FOREVER)


def raise_in_handler() -> None:
    """A handler of SIGTERM that raises, as Lightning's does when the other ranks are gone."""

    def broadcast(*_: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    if my_rank() == 1:
        raise DataError("The data set is empty.")
    signal.signal(signal.SIGTERM, broadcast)
    time.sleep(FOREVER)


def write_pid_and_wait(folder: Path) -> None:
    write_pid(folder)
    time.sleep(FOREVER)


def write_pid(folder: Path) -> None:
    draft = folder / f"draft_{my_rank()}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"{my_rank()}")


def save_with_a_worker(folder: Path) -> None:
    """A rank that ends in order when it is told to, which takes it a while, and for which it needs
    a process that it has started."""
    worker = subprocess.Popen(["sleep", str(FOREVER)])
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    write_pid(folder)
    while not told:
        time.sleep(0.05)
    time.sleep(0.5)
    (folder / f"saved_{my_rank()}").write_text(
        "whole" if worker.poll() is None else "without its worker"
    )
    sys.exit(128 + told[0])


# Tests


@pytest.mark.parametrize("fork", [True, False], ids=["fork", "spawn"])
def test_every_rank_knows_its_place(tmp_path: Path, fork: bool) -> None:
    places = tmp_path / "places"
    places.mkdir()
    assert run(write_place, places, logs=tmp_path / "logs", fork=fork) == Outcome(0)
    told = [(places / str(rank)).read_text().split() for rank in range(3)]
    assert [place[:5] for place in told] == [
        [str(rank), str(rank), "3", "3", "127.0.0.1"] for rank in range(3)
    ]
    assert len({place[5] for place in told}) == 1, "all ranks meet at one port"
    assert len({place[6] for place in told}) == 3, "each rank is a process of its own"


def test_ranks_but_the_first_print_to_their_logs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(write_place, tmp_path, logs=tmp_path / "logs")
    assert capfd.readouterr().out == "rank 0 was here\n"
    assert (tmp_path / "logs" / "rank_2.log").read_text() == "rank 2 was here\n"


@pytest.mark.parametrize("fork", by_default([True, False], 0), ids=["fork", "spawn"])
def test_error_of_one_rank_ends_all_and_is_told_once(
    tmp_path: Path, fork: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = run(raise_on, 1, ValueError("boom"), logs=tmp_path, fork=fork)
    assert outcome.exit_code == 1
    assert outcome.message is not None
    assert outcome.message.startswith("lightning_3d: rank 1 of 3 failed:\nTraceback")
    assert outcome.message.endswith("ValueError: boom")
    assert "boom" not in capfd.readouterr().err, "the caller prints the message, the ranks do not"


def test_mistake_of_the_user_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    assert run(raise_user_error, logs=tmp_path) == Outcome(
        2, "lightning_3d: The data set is empty."
    )


def test_handlers_of_sigterm_that_raise_print_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(raise_in_handler, logs=tmp_path) == Outcome(
        2, "lightning_3d: The data set is empty."
    )
    assert capfd.readouterr().err == ""


def test_closed_connections_are_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_SETTLE_SECONDS", 60.0)
    outcome = run(peers_notice_first, 2, logs=tmp_path)
    assert outcome.message is not None
    assert outcome.message.startswith("lightning_3d: rank 2 of 3 failed")
    assert "the true cause" in outcome.message
    assert "Connection closed" not in outcome.message


@pytest.mark.slow
def test_lost_peer_is_told_when_nobody_has_another_cause(tmp_path: Path) -> None:
    error = RuntimeError("Connection reset by peer")
    outcome = run(raise_on, 1, error, logs=tmp_path)
    assert outcome.message is not None
    assert "rank 1 of 3 failed because another rank disappeared" in outcome.message


def test_f48_killed_rank_is_the_cause(tmp_path: Path) -> None:
    outcome = run(kill_on, 1, signal.SIGKILL, logs=tmp_path)
    assert outcome.exit_code == 1
    assert outcome.message is not None
    assert "rank 1 of 3 failed" in outcome.message
    assert "SIGKILL (out of memory?)" in outcome.message
    assert "the last words of rank 1" in outcome.message


@pytest.mark.parametrize(("before", "after"), [(3, 4), (4, 4)])
def test_f53_kill_for_lack_of_memory_is_told_from_others(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts its kills in the control group."""
    group = tmp_path / "cgroup"
    (group).mkdir()
    events = group / "memory.events"
    events.write_text(f"low 0\noom 9\noom_kill {before}\n")
    monkeypatch.setattr(memory_kills, "CGROUP", group)
    monkeypatch.setattr(memory_kills, "_VMSTAT", group / "none")

    def kills_then() -> int:
        return int(events.read_text().split()[-1])

    ranks = supervisor.Ranks(kill_on, (1, signal.SIGKILL), 1, tmp_path, fork=True)
    assert ranks.kills_before == before == kills_then()
    events.write_text(f"low 0\noom 9\noom_kill {after}\n")
    said = supervisor._silent_end(ranks, 0, -signal.SIGKILL)
    because = (
        ", because the machine ran out of memory, and"
        if after > before
        else " (out of memory?) and"
    )
    assert said == f"it was killed by SIGKILL{because} reported no error."


@pytest.mark.slow
def test_rank_that_leaves_without_a_word_is_the_cause(tmp_path: Path) -> None:
    outcome = run(leave_on, 2, 7, logs=tmp_path)
    assert outcome.exit_code == 1
    assert outcome.message is not None
    assert "rank 2 of 3 failed:\nit exited with code 7" in outcome.message


def test_sys_exit_0_is_no_failure(tmp_path: Path) -> None:
    assert run(sys.exit, 0, logs=tmp_path) == Outcome(0)


def test_rank_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    outcome = run(ignore_sigterm, folder, logs=tmp_path)
    assert outcome.message is not None and "rank 0 gives up" in outcome.message
    assert not any(is_running(int(file.read_text())) for file in folder.iterdir())


def test_what_a_rank_started_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "pids"
    folder.mkdir()
    run(start_child, folder, logs=tmp_path)
    children = [int((folder / str(rank)).read_text()) for rank in range(3)]
    assert wait_until(lambda: not any(is_running(child) for child in children), 5)


@pytest.mark.full
def test_rank_that_hangs_after_its_failure_does_not_hold_up_the_run(tmp_path: Path) -> None:
    outcome = run(hang_after_post, logs=tmp_path)
    assert outcome.message is not None and "ValueError: posted" in outcome.message


SUPERVISOR = """
import signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
import test_launch
from lightning_3d.ranks import supervisor
supervisor._ONE_REQUEST_SECONDS = 600.0
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[3] == "nohup" else signal.SIG_DFL)
    folder, job = Path(sys.argv[1]), getattr(test_launch, sys.argv[2])
    outcome = supervisor.launch(job, (folder,), 3, logs=folder / "logs", fork=True, grace=2.0)
    sys.exit(outcome.exit_code)
"""


def supervise(
    folder: Path, job: Callable[..., None], how: str = ""
) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A supervisor in a process of its own, and the process ids of its three ranks."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder), job.__name__, how, *sys.path],
        env=environment(),
    )
    assert wait_until(lambda: all((folder / str(rank)).is_file() for rank in range(3)))
    return process, [int((folder / str(rank)).read_text()) for rank in range(3)]


@pytest.fixture
def supervised(tmp_path: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A supervisor and its ranks, which wait."""
    return supervise(tmp_path, write_pid_and_wait)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_all_ranks(
    supervised: tuple[subprocess.Popen[bytes], list[int]], number: int
) -> None:
    process, ranks = supervised
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert not any(is_running(rank) for rank in ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ranks_end_in_order_however_often_one_request_is_sent(number: int, tmp_path: Path) -> None:
    """As by a terminal that closes, or by `timeout`."""
    process, _ = supervise(tmp_path, save_with_a_worker)
    for again in (number, number, signal.SIGHUP):
        process.send_signal(again)
        time.sleep(0.1)
    assert process.wait(60) == 128 + number
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in range(3)] == ["whole"] * 3


def test_nohup_protects_the_run_and_its_ranks(tmp_path: Path) -> None:
    process, ranks = supervise(tmp_path, save_with_a_worker, "nohup")
    for pid in (process.pid, *ranks):
        os.kill(pid, signal.SIGHUP)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in range(3)] == ["whole"] * 3


def test_a_run_that_was_over_when_the_signal_came_has_finished(tmp_path: Path) -> None:
    assert run(finish_all_the_same, logs=tmp_path, grace=60.0) == Outcome(0)


def test_killed_supervisor_takes_its_ranks_along(
    supervised: tuple[subprocess.Popen[bytes], list[int]],
) -> None:
    process, ranks = supervised
    process.kill()
    process.wait(30)
    assert wait_until(lambda: not any(is_running(rank) for rank in ranks), 10)


def test_only_logs_are_left(tmp_path: Path) -> None:
    run(raise_user_error, logs=tmp_path)
    # rank 2 may not have been started any more
    assert {file.name for file in tmp_path.iterdir()} <= {"rank_1.log", "rank_2.log"}


def test_what_a_killed_supervisor_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".failures_of_a_killed_one").mkdir()
    run(raise_user_error, logs=tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_no_child_is_left_unreaped(tmp_path: Path) -> None:
    run(raise_on, 1, ValueError("boom"), logs=tmp_path)
    with contextlib.suppress(ChildProcessError):
        assert os.waitpid(-1, os.WNOHANG)[0] == 0


# Ranks that others started


def test_ranks_of_torchrun_and_slurm_are_recognized() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert outside_rank(torchrun) == OutsideRank(5, 1, 8, 4, "torchrun")
    assert OutsideRank(5, 1, 8, 4, "torchrun").nodes == 2
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "2",
        "SLURM_STEP_ID": "0",
    }
    assert outside_rank(slurm) == OutsideRank(5, 1, 8, 4, "slurm")


def test_shell_inside_a_slurm_allocation_is_no_rank() -> None:
    batch_script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "train.sh"}
    interactive = batch_script | {"SLURM_STEP_ID": "4294967290", "SLURM_JOB_NAME": "interactive"}
    assert outside_rank({}) is outside_rank(batch_script) is outside_rank(interactive) is None


def test_slurm_ranks_meet_at_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_NODELIST": "node[03-06]",
        "SLURM_JOB_ID": "4711",
        "SLURM_NTASKS": "8",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="ntasks-per-node"):
        set_master_address(OutsideRank(5, 1, 8, 2, "slurm"))
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    set_master_address(OutsideRank(5, 1, 8, 2, "slurm"))
    assert os.environ["MASTER_ADDR"] == "node03" and os.environ["MASTER_PORT"].isdigit()
