"""Start the ranks of a run on this machine, and stop them all when one fails.

`launch` is the supervisor. It runs in the process that the user started, imports the heavy
libraries once and forks the ranks, which starts eight of them in about a second instead of twenty.
Where a fork is not safe (CUDA, threads), ranks are fresh interpreters. Under torchrun and SLURM the
ranks exist already: see `outside_rank`.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_3d.ranks.boards import FOLDER_VARIABLE, FolderBoard
from lightning_3d.ranks.failure import Failure, silent_end
from lightning_3d.ranks.memory_kills import kills
from lightning_3d.ranks.output import flush_output, survive_output, surviving_stream
from lightning_3d.ranks.process_ties import belong_to, tied_interpreters
from lightning_3d.ranks.reporter import FailureReporter

SAVE_SECONDS = 300.0
"""Time for ranks to end after a signal to the run: they finish a step and save. A second SIGTERM or
SIGINT stops them at once."""

_ONE_REQUEST_SECONDS = 0.5
"""Signals so soon after the first one are the same request: timeout(1) sends two, and a terminal
that closes sends several."""

GRACE_SECONDS = 8.0
"""Time for ranks to end by themselves after SIGTERM, before SIGKILL."""

_BOARD = ".failures_"
_SETTLE_SECONDS = 2.0
_TEARDOWN_SECONDS = 5.0
_LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        exit_code: exit code for this process; 128 + n after signal n.
        message: message for the user; None after success or a signal.
    """

    exit_code: int
    message: str | None = None


@dataclass
class Ranks:
    """The ranks of one machine, as processes.

    Args:
        job: function to call in every rank; at module level, so that fresh interpreters find it.
        arguments: arguments of the job; pickled for fresh interpreters.
        count: number of ranks.
        logs: folder for the output of ranks other than 0.
        fork: whether to fork the ranks from this process instead of starting fresh interpreters.
        threads: threads of each rank; None: torch's default.
    """

    job: Callable[..., None]
    arguments: tuple[Any, ...]
    count: int
    logs: Path
    fork: bool
    threads: int | None = None
    processes: list[BaseProcess] = field(default_factory=list)
    ended: dict[int, tuple[float, int]] = field(default_factory=dict)
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kills_before: int = field(default_factory=kills)

    def start(self, board: Path) -> None:
        """Start all ranks, with environment variables like torchrun's and each in its own process
        group."""
        context = multiprocessing.get_context("fork" if self.fork else "spawn")
        if self.fork:
            gc.collect()
            # imported objects never change; if the collector touched their memory pages, forked
            # ranks would copy them
            gc.freeze()
        port = self.held.enter_context(_reserved_port())
        with tied_interpreters() if not self.fork else contextlib.nullcontext():
            for rank in range(self.count):
                environment = rank_environment(rank, self.count, port) | {
                    FOLDER_VARIABLE: str(board)
                }
                arguments = (
                    self.job,
                    self.arguments,
                    environment,
                    self.logs,
                    self.threads,
                    os.getpid(),
                )
                process = context.Process(target=_run_rank, args=arguments, name=f"rank {rank}")  # type: ignore[attr-defined]
                process.start()
                self.processes.append(process)
                with contextlib.suppress(OSError):  # the rank does the same; the first one succeeds
                    os.setpgid(process.pid or 0, process.pid or 0)

    @property
    def running(self) -> list[int]:
        return [rank for rank in range(len(self.processes)) if rank not in self.ended]

    def wait(self, seconds: float) -> None:
        """Wait until a rank ends, at most `seconds`, and record which have ended."""
        sentinels = [self.processes[rank].sentinel for rank in self.running]
        connection.wait(sentinels, seconds)
        for rank in self.running:
            code = self.processes[rank].exitcode
            if code is not None:
                self.ended[rank] = (time.time(), code)

    def send(self, signal_number: int) -> None:
        """Send a signal to the running ranks and to the processes that they started."""
        for rank in self.running:
            pid = self.processes[rank].pid or 0
            with contextlib.suppress(ProcessLookupError):
                try:
                    os.killpg(pid, signal_number)
                except ProcessLookupError:  # a fresh interpreter that does not lead its group yet
                    os.kill(pid, signal_number)

    def send_to_ranks(self, signal_number: int) -> None:
        """Send a signal to the ranks alone: the data loaders' workers must run until the ranks have
        finished their step."""
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal_number)

    def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Send SIGTERM, wait some seconds, and send SIGKILL to the ranks that are left."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.running and time.monotonic() < deadline:
            self.wait(0.2)
        self.send(signal.SIGKILL)
        while self.running:
            self.wait(1.0)
        for process in self.processes:  # processes that were started by ranks that have ended
            with contextlib.suppress(OSError):
                os.killpg(process.pid or 0, signal.SIGKILL)


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank on one machine; gloo then
    listens on this machine only."""
    interface = (
        {"GLOO_SOCKET_IFNAME": "lo"}
        if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ
        else {}
    )
    return interface | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def launch(
    job: Callable[..., None],
    arguments: tuple[Any, ...],
    count: int,
    *,
    logs: Path,
    fork: bool,
    threads: int | None = None,
    grace: float = GRACE_SECONDS,
) -> Outcome:
    """Run `job(*arguments)` in `count` ranks on this machine until all have ended.

    The first rank that fails ends the run: the others get SIGTERM, and SIGKILL after `grace`
    seconds. SIGINT and SIGTERM are passed on, SIGHUP as SIGTERM. If this process is killed, the
    kernel kills the ranks (Linux).

    Args:
        job: see `Ranks`.
        arguments: see `Ranks`.
        count: number of ranks.
        logs: folder for the output of ranks other than 0, in `rank_N.log`; rank 0 prints to the
            terminal.
        fork: see `Ranks` and `can_fork`.
        threads: see `Ranks`.
        grace: seconds between SIGTERM and SIGKILL.
    """
    logs.mkdir(parents=True, exist_ok=True)
    for earlier in logs.glob(f"{_BOARD}*"):  # of a supervisor that was killed
        shutil.rmtree(earlier, ignore_errors=True)
    board = Path(tempfile.mkdtemp(prefix=_BOARD, dir=logs))
    FolderBoard(board).reserve(count)
    ranks = Ranks(job, arguments, count, logs, fork, threads)
    try:
        with _signals() as received:
            ranks.start(board)
            while ranks.running:
                ranks.wait(0.2)
                if received:
                    return _interrupted(ranks, received, grace)
                if _has_failed(ranks, FolderBoard(board)):
                    return _failed(ranks, FolderBoard(board), grace)
        return Outcome(0)
    finally:
        if ranks.running:
            ranks.stop(0.0)
        ranks.held.close()
        shutil.rmtree(board, ignore_errors=True)


def can_fork() -> bool:
    """Check whether ranks may be forked from this process: only if it has a single thread, which
    the fork keeps.

    The caller, who knows the accelerator, excludes CUDA in the parent.
    """
    tasks = Path("/proc/self/task")
    return tasks.is_dir() and len(list(tasks.iterdir())) == 1 and threading.active_count() == 1


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _interrupted(ranks: Ranks, received: list[int], grace: float) -> Outcome:
    """Pass a signal on, let the ranks end in order, and return the exit code that a shell
    expects."""
    number = received[0]
    ranks.send_to_ranks(signal.SIGTERM if number == signal.SIGHUP else number)
    if number == signal.SIGINT:
        words = (
            "lightning_3d: SIGINT: the ranks finish their step and save a checkpoint. Press Ctrl-C"
            " again to stop at once."
        )
        print(words, file=sys.stderr, flush=True)
    deadline = time.monotonic() + SAVE_SECONDS
    while ranks.running and time.monotonic() < deadline and len(received) == 1:
        ranks.wait(0.2)
        if ranks.ended:  # they end together
            deadline = min(
                deadline,
                max(when for when, _ in ranks.ended.values())
                - time.time()
                + time.monotonic()
                + grace,
            )
    if len(ranks.ended) == ranks.count and not any(code for _, code in ranks.ended.values()):
        return Outcome(0)  # the run had ended before the signal reached its ranks
    ranks.stop(grace if len(received) == 1 else 0.0)
    return Outcome(128 + number)


def _has_failed(ranks: Ranks, board: FolderBoard) -> bool:
    """Check whether a rank failed, or posted a failure and does not end."""
    if any(code != 0 for _, code in ranks.ended.values()):
        return True
    return any(time.time() - post.time > _TEARDOWN_SECONDS for post in board.all())


def _failed(ranks: Ranks, board: FolderBoard, grace: float) -> Outcome:
    """End the run and find the cause."""
    dead = [(when, rank, code) for rank, (when, code) in ranks.ended.items() if code != 0]
    # ranks that lost a peer may end before the rank that failed has posted
    if all(code > 0 for _, _, code in dead):
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (
            ranks.running
            and all(post.lost_peer for post in board.all())
            and time.monotonic() < deadline
        ):
            ranks.wait(0.1)
    ranks.stop(grace)
    posts = board.all()
    posted = {post.rank for post in posts}
    for when, rank, code in dead:
        if rank not in posted:
            posts.append(Failure(rank, 1, _silent_end(ranks, rank, code), False, when))
    causes = sorted(posts, key=lambda post: (post.lost_peer, post.time))
    # a signal to one rank ended all of them: nothing to report
    by_signal = causes[0].exit_code > 128 and causes[0].lost_peer
    message = None if by_signal else causes[0].message(ranks.count)
    return Outcome(causes[0].exit_code, message)


def _silent_end(ranks: Ranks, rank: int, code: int) -> str:
    """Describe the end of a rank that reported no error, with the end of its log."""
    log = ranks.logs / f"rank_{rank}.log"
    tail = (
        log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        if log.is_file()
        else ""
    )
    return silent_end(code, memory_kill=kills() > ranks.kills_before) + (
        f" The end of {log}:\n{tail}" if tail else ""
    )


def end_signals() -> list[int]:
    """Return the signals that ask a run to end. SIGHUP is not one of them where this process was
    started to ignore it, by nohup."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the requests to end this run instead of acting on them. SIGHUP repeats none: nobody
    sends it twice on purpose."""
    received: list[int] = []
    again = 0.0

    def collect(number: int, frame: FrameType | None) -> None:
        nonlocal again
        now = time.monotonic()
        if not received:
            again = now + _ONE_REQUEST_SECONDS
        if not received or (number != signal.SIGHUP and now > again):
            received.append(number)

    before = {number: signal.signal(number, collect) for number in end_signals()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Reserve a port until rank 0 listens on it.

    The socket is bound but does not listen; with SO_REUSEADDR on both sides, rank 0 can listen on
    the port and others cannot get it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# The rest runs in the ranks.


def _run_rank(
    job: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    logs: Path,
    threads: int | None,
    supervisor: int,
) -> None:
    """Run the job in a rank, and exit with the code of its failure, which the supervisor prints."""
    belong_to(supervisor)
    for number in end_signals():
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    os.environ.update(environment)
    survive_output()
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    reporter = FailureReporter(FolderBoard(Path(environment[FOLDER_VARIABLE])), rank, world_size)
    if rank > 0:
        _redirect_output(logs / f"rank_{rank}.log")
    if threads is not None:
        _limit_threads(threads)
    code = reporter.run(lambda: job(*arguments))
    flush_output()
    sys.exit(code)


def _redirect_output(path: Path) -> None:
    """Redirect standard output and error, also of C++ libraries, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    flush_output()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = surviving_stream(1)
    sys.stderr = surviving_stream(2)


def _limit_threads(threads: int) -> None:
    """Limit the threads of this rank: several ranks share the cores of this machine."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)
