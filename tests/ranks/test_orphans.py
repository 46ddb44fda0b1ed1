"""No process of a run outlives the one that the user started, whenever that is killed; and where
ranks meet is found right first."""

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orphans
import pytest
from command_line import REPOSITORY, environment
from orphans import Run

from lightning_3d.errors import ConfigError
from lightning_3d.ranks.rendezvous import CHOSEN_VARIABLE, explained_errors, hold_meeting_point

SCRIPT = [orphans.__file__]
TRAIN = [
    "train.py",
    "parallelism=dp2",
    "cluster=local_cpu",
    "trainer.max_steps=2",
    "trainer.checkpoint_every_n_steps=2",
]
SUPERVISOR = """
import sys, time
from pathlib import Path
from lightning_3d.ranks.supervisor import launch
if __name__ == "__main__":
    launch(time.sleep, (600,), 2, logs=Path("logs"), fork=False)
"""
FULL = pytest.mark.full


# Kills


@pytest.mark.parametrize(
    ("phase", "markers"),
    [
        pytest.param("exec", 1, marks=FULL),
        pytest.param("imports", 1, marks=FULL),
        pytest.param("rendezvous", 2, marks=FULL),
        pytest.param("build", 2, marks=FULL),
        pytest.param("step", 2, marks=FULL),  # by default test_own_script.py kills rank 0 in a step
        pytest.param("save", 2, marks=FULL),
        pytest.param("teardown", 2, marks=FULL),
        pytest.param("end", 1, marks=FULL),
    ],
)
def test_script_that_is_killed_takes_its_ranks_along(
    phase: str, markers: int, tmp_path: Path
) -> None:
    Run(SCRIPT, phase, tmp_path).kill_at(markers)


def test_fresh_interpreters_belong_to_the_supervisor_from_their_first_line(tmp_path: Path) -> None:
    (tmp_path / "supervisor.py").write_text(SUPERVISOR)
    Run(["supervisor.py"], "exec", tmp_path).kill_at(2)


@FULL
@pytest.mark.parametrize(
    ("phase", "markers", "more"),
    [
        ("exec", 2, ["trainer.start_method=spawn"]),
        ("imports", 2, ["trainer.start_method=spawn"]),
        ("rendezvous", 2, []),
        ("build", 2, []),
        ("step", 2, []),
        ("save", 2, []),
        ("teardown", 2, []),
        ("step", 2, ["-m", "seed=1,2"]),
    ],
)
def test_train_that_is_killed_takes_its_ranks_along(
    phase: str, markers: int, more: list[str], tmp_path: Path
) -> None:
    callback = "+callbacks.phases._target_=orphans.phase_callback"
    Run([str(REPOSITORY / TRAIN[0]), *TRAIN[1:], callback, *more], phase, tmp_path).kill_at(markers)


@FULL
@pytest.mark.parametrize(
    "command",
    [["verify", "parallelism=dp2"], ["profile", "--ranks=2"]],
    ids=lambda command: command[0],
)
def test_other_commands_that_are_killed_take_their_ranks_along(
    command: list[str], tmp_path: Path
) -> None:
    run = Run(["-m", "lightning_3d", *command, "cluster=local_cpu"], "none", tmp_path)
    try:
        deadline = time.monotonic() + 120
        while len(run.members()) < 3:
            assert run.process.poll() is None and time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.05)
        run.kill()
    finally:
        for process in run.members():
            process.kill()


@pytest.mark.full
def test_rank_0_that_fails_before_the_ranks_meet_ends_them_all(tmp_path: Path) -> None:
    run = Run(SCRIPT, "failure", tmp_path)
    assert run.process.wait(120) == 1, run.log.read_text()
    assert run.log.read_text().count("ArithmeticError: rank 0 fails") == 1, run.log.read_text()
    assert not run.members()


CHILDREN = """\
    import os, subprocess, sys, threading
    from functools import partial
    from types import SimpleNamespace
    from lightning_3d.ranks import children
    from lightning_3d.ranks.process_ties import die_with
    children.LAST_SECONDS = 1.0
    def begin():
        return [subprocess.Popen(["sh", "-c", line], preexec_fn=partial(die_with, os.getpid())) for line in sys.argv[1:]]
    ranks = children.Children(0, len(sys.argv))
    ranks.reporter = SimpleNamespace(has_failed=False, speak_for=lambda failure: print("spoke for", failure.rank, failure.text))
    thread = threading.Thread(target=ranks.start, args=(begin,))
    thread.start()
    thread.join()
"""  # noqa: E501


def end_script(body: str, *lines: str) -> tuple[int, str]:
    """(exit code, output) of a rank 0 whose children run lines of a shell."""
    command = [sys.executable, "-c", textwrap.dedent(CHILDREN) + body, *lines]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def test_script_waits_for_its_ranks_though_the_thread_that_started_them_has_ended() -> None:
    assert end_script(
        "print([process.wait() for process in ranks._processes])", "sleep 0.5", "sleep 0.5"
    ) == (0, "[0, 0]\n")


def test_rank_that_does_not_come_to_the_end_of_the_script_is_ended() -> None:
    words = (
        "lightning_3d: rank 2 of 3 did not end within 1 s after rank 0 reached the end of the"
        " script, and was killed.\n"
    )
    assert end_script("", "sleep 0.2", "exec sleep 600") == (1, words)


def test_script_that_fails_does_not_wait_for_ranks_that_wait_for_it() -> None:
    body = (
        "children.LAST_SECONDS, children.PATIENCE_SECONDS = 600.0, 0.1\nraise ArithmeticError('no')"
    )
    code, output = end_script(body, "exec sleep 600")
    assert (
        code == 1
        and output.endswith("ArithmeticError: no\n")
        and "did not end within" not in output
    )


@pytest.mark.parametrize(
    ("line", "code", "how"),
    [
        pytest.param("exit 3", 3, "exited with code 3", id="early"),
        pytest.param("sleep 0.7; exit 3", 3, "exited with code 3", id="late"),
        pytest.param("sleep 0.7; kill -9 $$", 1, "was killed by SIGKILL", id="killed"),
    ],
)
def test_script_does_not_end_with_0_when_a_rank_fails_after_its_last_collective(
    line: str, code: int, how: str
) -> None:
    body = (
        "import atexit\nprint('rank 0 is done', flush=True)\natexit.register(print, 'the own"
        " handler of the script', flush=True)"
    )
    ended, output = end_script(body, "exit 0", line)
    assert ended == code and output.startswith("rank 0 is done\nthe own handler of the script\n"), (
        output
    )
    assert output.count("lightning_3d: ") == 1 and f"rank 2 of 3 {how}" in output, output


def test_script_that_survives_its_failure_does_not_hide_that_of_another_rank() -> None:
    assert end_script("ranks.reporter.has_failed = True", "exit 3") == (3, "")
    assert end_script("ranks.reporter.has_failed = True\nsys.exit(2)", "exit 0") == (2, "")


# Where the ranks meet


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which another program listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lightning's cluster environment, with no variables that say where ranks meet."""
    from lightning.fabric.plugins.environments import LightningEnvironment

    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "STANDALONE_PORT",
        "NODE_RANK",
        "GROUP_RANK",
        CHOSEN_VARIABLE,
    ):
        monkeypatch.setenv(name, "")  # is put back afterwards, whatever the test sets
        monkeypatch.delenv(name)
    return LightningEnvironment()


def test_port_is_chosen_and_held(cluster: Any) -> None:
    holder = hold_meeting_point(cluster, 1)
    assert holder is not None
    with holder:
        assert cluster.main_port == holder.getsockname()[1] == int(os.environ["MASTER_PORT"])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", cluster.main_port))
        # as torch's server does, with SO_REUSEADDR
        with socket.create_server(("", cluster.main_port)):
            pass


@pytest.mark.parametrize("name", ["MASTER_PORT", "STANDALONE_PORT"])
def test_taken_port_is_one_message(
    name: str, cluster: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, str(taken))
    with pytest.raises(ConfigError) as refusal:
        hold_meeting_point(cluster, 1)
    words = f"Rank 0 must listen on port {taken} ({name}), but another program uses it."
    assert (
        str(refusal.value)
        == f"{words} Unset {name} to use any free port, or set it to another port."
    )


@pytest.mark.parametrize("port", ["0", "65536", "-1", "29500.0", "abc", "", "\u0663"])
def test_port_that_is_none_is_one_message(
    port: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(
        ConfigError, match=f"MASTER_PORT must be a whole number from 1 to 65535; got {port!r}"
    ):
        hold_meeting_point(cluster, 1)
    with pytest.raises(ConfigError, match="the same for all ranks"), explained_errors(1):
        pass


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nowhere.invalid", "cannot be resolved"),
        ("a" * 300, "cannot be resolved"),
        ("192.0.2.1", "does not lead to this machine"),
    ],
)
def test_address_that_is_not_of_this_machine_is_one_message(
    address: str, words: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_3d.ranks.rendezvous._REACH_SECONDS", 0.2)
    monkeypatch.setattr("lightning_3d.ranks.rendezvous._RESOLVE_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_ADDR", address)
    with pytest.raises(
        ConfigError,
        match=f"{words}.* Because all ranks run on this machine, you can unset MASTER_ADDR",
    ):
        hold_meeting_point(cluster, 1)
    if words == "cannot be resolved":
        with pytest.raises(ConfigError, match=words), explained_errors(0):
            pass


def test_port_that_was_asked_for_before_is_kept_and_held(cluster: Any) -> None:
    port = cluster.main_port
    holder = hold_meeting_point(cluster, 1)
    assert holder is not None
    with holder:
        assert holder.getsockname()[1] == port == int(os.environ["MASTER_PORT"])


def test_nodes_must_know_where_they_meet(
    cluster: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="A run on 2 nodes needs MASTER_ADDR and MASTER_PORT"):
        hold_meeting_point(cluster, 2)
    monkeypatch.setenv("MASTER_PORT", str(taken))
    with pytest.raises(ConfigError, match="Set it to a free port, the same for all ranks"):
        hold_meeting_point(cluster, 2)
    monkeypatch.setenv("NODE_RANK", "1")
    assert hold_meeting_point(cluster, 2) is None, "only node 0 listens"


def test_port_that_is_lost_after_it_was_chosen_is_said_so(
    cluster: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError(f"The server socket has failed to listen. port: {taken}, name: EADDRINUSE")
    monkeypatch.setenv("MASTER_PORT", str(taken))
    with pytest.raises(ConfigError, match="Set it to a free port"), explained_errors(0):
        raise error
    with pytest.raises(RuntimeError, match="EADDRINUSE"), explained_errors(1):
        raise error
    monkeypatch.setenv(CHOSEN_VARIABLE, str(taken))
    with (
        pytest.raises(ConfigError, match="which had been chosen for the ranks"),
        explained_errors(0),
    ):
        raise error


@pytest.mark.slow
def test_script_on_a_taken_port_ends_before_it_starts_ranks(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("command_line.OUTSIDE", ())
    monkeypatch.setenv("MASTER_PORT", str(taken))
    run = Run(SCRIPT, "none", tmp_path)
    assert run.process.wait(120) == 2, run.log.read_text()
    assert (
        run.log.read_text().count(f"lightning_3d: Rank 0 must listen on port {taken} (MASTER_PORT)")
        == 1
    )
    assert "Traceback" not in run.log.read_text() and not run.members()
