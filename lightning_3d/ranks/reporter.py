"""Report a failing rank with one message: find who failed first, choose who prints it, and end the
other ranks.

When a rank raises, its connections close, and within milliseconds the other ranks fail too. Their
messages about closed connections would hide the cause. Every rank therefore posts its failure on a
board that all ranks share, before anything is torn down. The first post that is not about a lost
peer is the cause and is printed once. The others end quietly, with its exit code.

The board is a folder where one process supervises the ranks of a machine
(`lightning_3d.ranks.supervisor`), and a store that all ranks reach everywhere else (torchrun,
SLURM, a user's own script with Lightning's launcher). Importing this module imports no torch.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar, NoReturn, TextIO

from lightning_3d.errors import Lightning3DError
from lightning_3d.ranks.boards import Board, connect_board
from lightning_3d.ranks.failure import (
    Failure,
    cause_of,
    ending_signal,
    exit_code_of,
    ignore_sigterm,
)
from lightning_3d.ranks.meeting_store import JOIN_SECONDS
from lightning_3d.ranks.process_ties import die_with, outlive_parent

PARENT_VARIABLE = "LIGHTNING_3D_PARENT"
"""Environment variable with the process id of rank 0, for ranks that it started itself and that
must not outlive it."""

STORE_SECONDS = 5.0
"""Longest time that the end of this process waits for a call of a store."""

ORPHAN_SECONDS = 2.0
"""Time for a rank to end by itself after rank 0, which started it, was killed."""


class FailureReporter:
    """Reports the failure of this rank: posts it, prints it if it is the cause, and ends this
    process when another rank has failed.

    A strategy calls `watch` when its ranks are up, `note` at the first sight of an exception
    (before connections are torn down) and `close` at the end of its teardown. The exception itself
    propagates to the user's script; if nothing catches it, an exception hook prints nothing where
    another rank is the cause.

    Args:
        board: board that all ranks share.
        rank: global rank of this process.
        world_size: number of ranks of the run.
        grace: seconds for this process to end by itself after another rank failed; then it is
            killed, because it may wait in a collective forever.
        parent: process that started this rank and that it must not outlive; None if a launcher
            ensures this. The kernel kills this rank when the parent dies; only rank 1 watches by
            itself between `watch` and `close`, to report what happened.
    """

    record: ClassVar[Callable[[int, str], Any] | None] = None
    """Function that records exit code and message where this process is ended at once, by a thread;
    `finally` blocks do not run then."""

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        grace: float = 15.0,
        parent: int | None = None,
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._grace = grace
        self._parent = parent
        self._noted: Failure | None = None
        # failure of another rank; kept here because the board may be gone when this rank fails
        self._cause: Failure | None = None
        self._posted = False
        self._shows = False
        self._printed = False
        self._previous_hook: Callable[..., Any] | None = None
        self._speaks_for_parent = False
        self._closed = threading.Event()

    @classmethod
    def connect(cls, rank: int, world_size: int, seconds: float = JOIN_SECONDS) -> FailureReporter:
        """Create the reporter of this process on the board of this run. Collective over the world.

        Args:
            seconds: time for all ranks to join.
        """
        board = connect_board(rank, world_size, seconds)
        if _has_outlived_a_failure():
            board.forget(rank)
        parent = os.getppid() if os.environ.get(PARENT_VARIABLE) == str(os.getppid()) else None
        return cls(board, rank, world_size, parent=parent)

    def watch(self) -> None:
        """Take over uncaught exceptions and watch for other ranks' failures in a thread."""
        if self._previous_hook is None:
            self._previous_hook = sys.excepthook
            sys.excepthook = self._on_uncaught
            self._untie()
            watcher = threading.Thread(
                target=self._watch, name="lightning_3d-failures", daemon=True
            )
            watcher.start()
            atexit.register(_end_thread, watcher, self._closed)

    def run(self, job: Callable[[], None]) -> int:
        """Run a job and return the exit code for this process; a failure is reported here."""
        try:
            try:
                job()
            except BaseException as error:
                # also SystemExit and KeyboardInterrupt; SIGTERM may come until the next line has
                # run
                ignore_sigterm()
                return self.finish(error)
        except BaseException as error:
            # from a handler of SIGTERM that ran just before it was replaced
            return self.finish(error)
        return 0

    def note(self, error: BaseException) -> None:
        """Post an exception. Later calls change nothing: later exceptions are consequences of the
        first one."""
        if self._noted is None:
            self._noted = Failure.of(error, self._rank)
        if not self._posted:
            self._shows = self._cause is None and self._board.post(self._noted)
            self._posted = True

    def finish(self, error: BaseException, stream: TextIO | None = None) -> int:
        """Note an exception, print it if this rank is the one to print, and return the exit code of
        the cause."""
        # sys.exit() is no failure, and neither is a signal
        if exit_code_of(error) == 0 or ending_signal(error) is not None:
            return exit_code_of(error)
        self.note(error)
        assert self._noted is not None
        if self._shows and not self._printed:
            self._printed = True
            print(self._noted.message(self._world_size), file=stream or sys.stderr, flush=True)
        cause = self._cause or self._first()
        return cause.exit_code if cause is not None else self._noted.exit_code

    @property
    def reason(self) -> str:
        """Message of the failure that ended this rank; empty where there was none."""
        cause = self._cause or self._first() or self._noted
        return cause.message(self._world_size) if cause is not None else ""

    def speak_for(self, failure: Failure) -> None:
        """Post and print the end of another rank that reported no error; do nothing if a cause is
        known."""
        if self._first() is None and self._board.post(failure):
            print(failure.message(self._world_size), file=sys.stderr, flush=True)

    @property
    def board(self) -> Board:
        """The board that all ranks share."""
        return self._board

    def end_all(self, text: str) -> None:
        """End this process from another thread than the one that trains, and so all ranks, with a
        message that is printed once."""
        failure = Failure(self._rank, 1, text, False, time.time(), plain=True, others_hang=True)
        if self._first() is None and self._board.post(failure):
            print(failure.message(self._world_size), file=sys.stderr, flush=True)
        self._end_at_once(failure)

    def close(self) -> None:
        """Stop watching. After a failure the exception hook stays, because the exception is still
        propagating."""
        self._closed.set()
        if self._noted is None:
            self._tie()
        if self._noted is None and self._previous_hook is not None:
            sys.excepthook, self._previous_hook = self._previous_hook, None

    @property
    def has_failed(self) -> bool:
        """True once this rank has noted an exception."""
        return self._noted is not None

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        ignore_sigterm()
        code = self.finish(error)
        self._tie()
        raise SystemExit(code)

    def _untie(self) -> None:
        """Let rank 1 outlive rank 0 by a moment. Only in the main thread: a tie to a parent belongs
        to a thread."""
        if (
            self._parent is not None
            and self._rank == 1
            and threading.current_thread() is threading.main_thread()
        ):
            outlive_parent()
            self._speaks_for_parent = True

    def _tie(self) -> None:
        """Tie rank 1 to its parent again: from here on nothing watches, not even in destructors
        that wait for other ranks."""
        if self._speaks_for_parent and threading.current_thread() is threading.main_thread():
            assert self._parent is not None
            self._speaks_for_parent = False
            if os.getppid() != self._parent and self._noted is None:
                self._end_orphaned()
            die_with(self._parent)

    def _end_orphaned(self) -> None:
        """Print the noted failure, or that rank 0 is gone, and end this process."""
        if self._rank == 1 and not self._printed and (self._noted is None or self._shows):
            failure = self._noted
            if failure is None or failure.lost_peer:
                failure = Failure(0, 1, "it ended and reported no error.", False, time.time())
            print(failure.message(self._world_size), file=sys.stderr, flush=True)
        os._exit(1)

    def _end_at_once(self, failure: Failure) -> NoReturn:
        if FailureReporter.record is not None:
            with contextlib.suppress(OSError):
                FailureReporter.record(failure.exit_code, failure.message(self._world_size))
        os._exit(failure.exit_code)

    def _first(self) -> Failure | None:
        try:
            return self._board.first()
        except (RuntimeError, OSError, ValueError):
            # the store or folder is gone, or half gone, with the process that owned it
            return None

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            failure = self._first()
            if failure is None and self._parent not in (None, os.getppid()):
                if not self._closed.wait(ORPHAN_SECONDS):
                    self._end_orphaned()
                return
            if failure is not None and failure.rank != self._rank:
                self._cause = failure
                if not self._closed.wait(0.0 if failure.others_hang else self._grace):
                    self._end_at_once(failure)  # an orderly end would wait for ranks that are gone
                return


def _end_thread(thread: threading.Thread, closed: threading.Event) -> None:
    """End a watcher before the interpreter does: a thread that is inside a store at that moment
    aborts the process (SIGABRT)."""
    closed.set()
    thread.join(STORE_SECONDS)


def show_refusals_plainly() -> None:
    """Print an uncaught `Lightning3DError` without a traceback and exit with code 2, in a user's
    own script.

    For errors before ranks are connected; from then on a `FailureReporter` decides. Under a
    launcher only rank 0 prints.
    """
    if getattr(sys.excepthook, "shows_refusals", False):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        refusal = cause_of(error)
        if not isinstance(refusal, Lightning3DError):
            previous(kind, error, trace)
            return
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            # Not sys.stderr: torch's own hook replaces it by a buffer that a SystemExit never
            # flushes.
            print(f"lightning_3d: {refusal}", file=sys.__stderr__, flush=True)
        if not hasattr(sys, "ps1"):  # at a Python prompt, the session continues
            raise SystemExit(refusal.exit_code)

    hook.shows_refusals = True  # type: ignore[attr-defined]
    hook.previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook


def _has_outlived_a_failure() -> bool:
    """Check whether this process caught a failure that it had posted: the hook of that time is
    still in place."""
    hook: Any = sys.excepthook
    while hook is not None:
        reporter = getattr(hook, "__self__", None)
        if isinstance(reporter, FailureReporter):
            return reporter._noted is not None
        hook = getattr(hook, "previous", None)
    return False
