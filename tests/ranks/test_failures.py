"""Failures told once over a store, where no process supervises the ranks: torchrun, SLURM, a user's
own script."""

import io
import os
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import environment
from processes import wait_until
from ranks import run_ranks
from torch.distributed import TCPStore

from lightning_3d.app.cli.options import guarded
from lightning_3d.errors import LayoutError
from lightning_3d.ranks.boards import FolderBoard, LocalBoard, StoreBoard
from lightning_3d.ranks.failure import Failure, exit_code_of, is_lost_peer
from lightning_3d.ranks.reporter import FailureReporter
from lightning_3d.ranks.supervisor import _reserved_port

WORLD = 3
CLOSED = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


@pytest.fixture
def stores() -> list[TCPStore]:
    """One connection to the same store for each of three ranks."""
    server = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    others = [TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(WORLD - 1)]
    return [server, *others]


def finish_all(
    stores: list[TCPStore], errors: list[BaseException], later: set[int], patience: float = 60.0
) -> list[tuple[int, str]]:
    """Exit code and output of each rank. Those of `later` fail after one of the others has posted
    its failure."""
    ended: dict[int, tuple[int, str]] = {}

    def end(rank: int) -> None:
        board = StoreBoard(stores[rank], WORLD, patience=patience)
        if rank in later:
            assert wait_until(lambda: board.first() is not None, 60.0)
        reporter = FailureReporter(board, rank, WORLD)
        output = io.StringIO()
        ended[rank] = (reporter.finish(errors[rank], output), output.getvalue())

    threads = [threading.Thread(target=end, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ended[rank] for rank in range(WORLD)]


def test_the_rank_that_failed_first_shows_its_error(stores: list[TCPStore]) -> None:
    errors: list[BaseException] = [ValueError("late"), ValueError("first"), ValueError("later")]
    ended = finish_all(stores, errors, {0, 2})
    assert [code for code, _ in ended] == [1, 1, 1]
    assert [bool(output) for _, output in ended] == [False, True, False]
    assert "rank 1 of 3 failed" in ended[1][1] and "ValueError: first" in ended[1][1]


def test_lost_peers_wait_for_the_cause(stores: list[TCPStore]) -> None:
    ended = finish_all(stores, [CLOSED, CLOSED, LayoutError("It does not fit.")], set())
    assert [code for code, _ in ended] == [2, 2, 2], "all ranks end with the exit code of the cause"
    assert [output for _, output in ended] == ["", "", "lightning_3d: It does not fit.\n"]


def test_lost_peers_alone_are_shown_once(stores: list[TCPStore]) -> None:
    ended = finish_all(stores, [CLOSED, CLOSED, CLOSED], set(), patience=1.0)
    assert sorted(bool(output) for _, output in ended) == [False, False, True]
    assert "because another rank disappeared without an error" in "".join(
        output for _, output in ended
    )


def test_a_mistake_that_all_ranks_find_is_shown_once(stores: list[TCPStore]) -> None:
    ended = finish_all(stores, [LayoutError("No.") for _ in range(WORLD)], [0.0, 0.0, 0.0])
    assert sorted(output for _, output in ended) == ["", "", "lightning_3d: No.\n"]


def test_noting_early_and_finishing_elsewhere_shows_the_error_once(stores: list[TCPStore]) -> None:
    """A strategy notes an exception at once; what prints it in the end may be another reporter."""
    error = ValueError("noted")
    FailureReporter(StoreBoard(stores[1], WORLD), 1, WORLD).note(error)
    output = io.StringIO()
    assert FailureReporter(StoreBoard(stores[1], WORLD), 1, WORLD).finish(error, output) == 1
    assert "ValueError: noted" in output.getvalue()


def test_broadcast_gives_every_rank_the_words_of_rank_0(stores: list[TCPStore]) -> None:
    heard: dict[int, str] = {}

    def tell(rank: int) -> None:
        heard[rank] = StoreBoard(stores[rank], WORLD).broadcast("folder", f"of rank {rank}", rank)

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == dict.fromkeys(range(WORLD), "of rank 0")


def test_single_process_shows_its_own_failure() -> None:
    output = io.StringIO()
    assert FailureReporter(LocalBoard(), 0, 1).finish(ValueError("boom"), output) == 1
    assert "rank 0 of 1 failed" in output.getvalue()


def test_exit_codes() -> None:
    errors: list[tuple[BaseException, int]] = [
        (LayoutError("x"), 2),
        (ValueError(), 1),
        (KeyboardInterrupt(), 130),
    ]
    errors += [(SystemExit(3), 3), (SystemExit(None), 0), (SystemExit("words"), 1)]
    assert [exit_code_of(error) for error, _ in errors] == [code for _, code in errors]


def test_an_interrupt_that_the_trainer_makes_an_exit_of_is_one() -> None:
    def interrupted() -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)

    assert guarded(interrupted) == 130
    with pytest.raises(SystemExit):
        guarded(lambda: sys.exit(3))


def test_lost_peers_are_recognized_through_what_they_caused() -> None:
    outer = ValueError("the step failed")
    outer.__cause__ = CLOSED
    assert is_lost_peer(outer)
    assert not is_lost_peer(ValueError("shape mismatch"))
    assert not Failure.of(LayoutError("about nccl"), 0).lost_peer


def test_mistake_of_the_user_is_found_behind_what_its_teardown_raised() -> None:
    try:
        try:
            raise LayoutError("It does not fit.")
        finally:
            torch.empty(1, device="meta").cpu()
    except NotImplementedError as error:
        failure = Failure.of(error, 0)
    assert (failure.exit_code, failure.text) == (2, "It does not fit.")


# A user's own script: two processes with a launcher's variables

SCRIPT = """
    import os, sys, time
    from lightning_3d.errors import LayoutError
    from lightning_3d.ranks.reporter import FailureReporter
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reporter = FailureReporter.connect(rank, world_size)
    reporter._grace = 2.0
    reporter.watch()
    """


def run_script(body: str, ranks: int = 2) -> list[tuple[int, str]]:
    """(exit code, standard error) of each rank of a script."""
    text = textwrap.dedent(SCRIPT) + textwrap.dedent(body)
    with _reserved_port() as port:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", text],
                env=environment(RANK=str(rank), **address),
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        errors = [process.communicate(timeout=60)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.mark.slow
def test_uncaught_exception_is_printed_by_the_rank_that_failed_only() -> None:
    ended = run_script("""
        if rank == 1:
            raise ValueError("boom")
        time.sleep(0.5)
        raise RuntimeError("Connection closed by peer")
        """)
    assert [code for code, _ in ended] == [1, 1]
    assert ended[0][1] == ""
    assert ended[1][1].count("ValueError: boom") == 1


@pytest.mark.slow
def test_rank_that_waits_for_ever_is_ended_when_another_fails() -> None:
    ended = run_script("""
        if rank == 1:
            raise LayoutError("It does not fit.")
        time.sleep(600)
        """)
    assert ended == [(2, ""), (2, "lightning_3d: It does not fit.\n")]


@pytest.mark.full
def test_script_that_catches_a_failure_and_trains_again_is_told_of_the_next() -> None:
    ended = run_script("""
        from lightning_3d.ranks.reporter import show_refusals_plainly
        try:
            raise ValueError("caught on all ranks")
        except ValueError as error:
            reporter.note(error)
            reporter.close()
        show_refusals_plainly()
        again = FailureReporter.connect(rank, world_size)
        again.watch()
        time.sleep(1 - rank)
        raise ValueError(f"not caught on rank {rank}")
        """)
    assert [code for code, _ in ended] == [1, 1]
    told = "".join(error for _, error in ended)
    assert "not caught on rank 1" in told and "caught on all ranks" not in told.replace(
        "not caught", ""
    )
    assert told.count("lightning_3d: rank") == 1


@pytest.mark.full
def test_watcher_inside_a_store_does_not_abort_a_process_that_ends() -> None:
    """A daemon thread that returns from C++ code after the interpreter has ended aborts the process
    with SIGABRT."""
    ended = run_script("""
        class Busy:
            def first(self):
                while time.monotonic() < until:
                    board.first()
        board, until, reporter._board = reporter._board, time.monotonic() + 2.5, Busy()
        time.sleep(1.5)
        sys.exit(3)
        """)
    assert ended == [(3, ""), (3, "")]


@pytest.mark.slow
def test_success_leaves_no_trace() -> None:
    ended = run_script("""
        reporter.close()
        assert sys.excepthook is sys.__excepthook__
        """)
    assert ended == [(0, ""), (0, "")]


def test_supervised_ranks_use_the_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "LIGHTNING_3D_FAILURES", str(tmp_path))
    output = io.StringIO()
    assert FailureReporter.connect(0, 8).finish(LayoutError("No."), output) == 2
    assert output.getvalue() == "", "the supervisor prints"
    assert [file.name for file in tmp_path.glob("failure_*")] == ["failure_0.json"]


def test_a_rank_that_a_thread_ends_at_once_records_why(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[int, str]] = []
    monkeypatch.setattr(os, "_exit", lambda code: recorded.append((code, "ended")))
    monkeypatch.setattr(
        FailureReporter, "record", lambda code, reason: recorded.append((code, reason))
    )
    FailureReporter(LocalBoard(), 0, 2).end_all("The node node1 is lost.")
    assert recorded == [(1, "lightning_3d: The node node1 is lost."), (1, "ended")]


def posted_and_seen(number: int) -> str | None:
    """What a call finds on its board; the first one leaves a failure behind."""
    from lightning_3d.ranks.boards import connect_board

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    board = connect_board(rank, world_size)
    found = board.first()
    if number == 0:
        board.post(Failure.of(LayoutError("No."), rank))
    return None if found is None else found.text


def test_a_restart_does_not_see_the_failure_of_an_earlier_attempt() -> None:
    run_ranks(posted_and_seen, 2, 0)
    assert run_ranks(posted_and_seen, 2, 1) == [None, None]


def test_a_failure_is_known_though_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room is reserved before; without that, the rank prints it."""
    board = FolderBoard(tmp_path)
    board.reserve(1)
    files = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    failure = Failure.of(ValueError("why"), 0)
    assert board.post(failure) is False and board.first() == failure
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == list(files.values()), (
        "the same file, without new room"
    )

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", fails)
    assert board.post(Failure.of(ValueError("why"), 1)) is True
