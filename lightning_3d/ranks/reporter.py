"""One failing rank, one message: who failed first, who prints it, and how the other ranks end.

A rank that raises takes its connections with it, so that within milliseconds the others fail as well, with messages
about closed connections that bury the cause. Every rank therefore posts its failure on a board that all ranks share,
before anything of it is torn down; the first post that is not about a lost peer is the cause and is shown once. The
others end quietly, with its exit code.

The board is a folder where one process supervises the ranks of a machine (`lightning_3d.ranks.supervisor`), and a store that all
ranks reach everywhere else (torchrun, SLURM, a user's own script with Lightning's launcher). Importing this module
imports no torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from lightning_3d.errors import Lightning3DError
from lightning_3d.ranks.boards import Board, connect_board
from lightning_3d.ranks.failure import Failure, cause_of, ending_signal, exit_code_of, ignore_sigterm
from lightning_3d.ranks.process_ties import die_with, outlive_parent

PARENT_VARIABLE = "LIGHTNING_3D_PARENT"
"""Process id of rank 0 in the environment of ranks that it started itself, which must not outlive it."""

ORPHAN_SECONDS = 2.0
"""How long a rank may take to end by itself after rank 0, which had started it, was killed."""


class FailureReporter:
    """A rank's side: posts its failure, shows it if it is the cause, and ends this process when another rank has
    failed.

    A strategy calls `watch` when its ranks are up, `note` at the first sight of an exception (before connections are
    torn down) and `close` at the end of its teardown. The exception itself goes on to the user's script; one that
    nothing catches ends in an exception hook that prints nothing where another rank is the cause.

    Args:
        board: shared by all ranks.
        rank, world_size: of this process.
        grace: seconds that this process has to end by itself after another rank failed; then it is ended, because it
            may wait in a collective for ever.
        parent: process that started this rank and without which it must not go on; None where somebody else sees to that. The kernel
            kills this rank when it dies; only rank 1 watches itself between `watch` and `close`, to say what happened.
    """

    def __init__(
        self, board: Board, rank: int, world_size: int, *, grace: float = 15.0, parent: int | None = None
    ) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._grace = grace
        self._parent = parent
        self._noted: Failure | None = None
        self._cause: Failure | None = None  # of another rank; the board may be gone by the time that this one fails
        self._posted = False
        self._shows = False
        self._told = False
        self._previous_hook: Callable[..., Any] | None = None
        self._speaks_for_parent = False
        self._closed = threading.Event()

    @classmethod
    def connect(cls, rank: int, world_size: int) -> FailureReporter:
        """The reporter of this process over the board of this run. Collective over the world."""
        board = connect_board(rank, world_size)
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
            threading.Thread(target=self._watch, name="lightning_3d-failures", daemon=True).start()

    def run(self, job: Callable[[], None]) -> int:
        """Run a job and return the exit code for this process; a failure is told here."""
        try:
            try:
                job()
            except BaseException as error:  # SystemExit and KeyboardInterrupt too: all go the same way
                ignore_sigterm()
                return self.finish(error)
        except BaseException as error:  # from a handler of SIGTERM that ran just before it was put aside
            return self.finish(error)
        return 0

    def note(self, error: BaseException) -> None:
        """Post an exception. Later calls change nothing: what follows a first exception is its consequence."""
        if self._noted is None:
            self._noted = Failure.of(error, self._rank)
        if not self._posted:
            self._shows = self._cause is None and self._board.post(self._noted)
            self._posted = True

    def finish(self, error: BaseException, stream: TextIO | None = None) -> int:
        """Note an exception, print it if this rank is to show it, and return the exit code of the cause."""
        if exit_code_of(error) == 0 or ending_signal(error) is not None:  # sys.exit() is no failure, and neither is a signal
            return exit_code_of(error)
        self.note(error)
        assert self._noted is not None
        if self._shows and not self._told:
            self._told = True
            print(self._noted.message(self._world_size), file=stream or sys.stderr, flush=True)
        cause = self._cause or self._first()
        return cause.exit_code if cause is not None else self._noted.exit_code

    @property
    def reason(self) -> str:
        """What the message of the failure says that ended this rank; nothing where none did."""
        cause = self._cause or self._first() or self._noted
        return cause.message(self._world_size) if cause is not None else ""

    def speak_for(self, failure: Failure) -> None:
        """Post and show the end of another rank that left no word; nothing where a cause is known."""
        if self._first() is None and self._board.post(failure):
            print(failure.message(self._world_size), file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the watch. After a failure the exception hook stays, because the exception is still on its way."""
        self._closed.set()
        if self._noted is None:
            self._tie()
        if self._noted is None and self._previous_hook is not None:
            sys.excepthook, self._previous_hook = self._previous_hook, None

    @property
    def has_failed(self) -> bool:
        """Whether this rank has noted an exception."""
        return self._noted is not None

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ignore_sigterm()
        code = self.finish(error)
        self._tie()
        raise SystemExit(code)

    def _untie(self) -> None:
        """Rank 1 outlives rank 0 by a moment. A tie to a parent belongs to a thread."""
        if self._parent is not None and self._rank == 1 and threading.current_thread() is threading.main_thread():
            outlive_parent()
            self._speaks_for_parent = True

    def _tie(self) -> None:
        """From here on nobody watches, not even in destructors that wait for other ranks."""
        if self._speaks_for_parent and threading.current_thread() is threading.main_thread():
            assert self._parent is not None
            self._speaks_for_parent = False
            if os.getppid() != self._parent and self._noted is None:
                self._end_orphaned()
            die_with(self._parent)

    def _end_orphaned(self) -> None:
        """End this process, once it has shown what it noted, or that rank 0 is gone."""
        if self._rank == 1 and not self._told and (self._noted is None or self._shows):
            failure = self._noted
            if failure is None or failure.lost_peer:
                failure = Failure(0, 1, "it ended without a word.", False, time.time())
            print(failure.message(self._world_size), file=sys.stderr, flush=True)
        os._exit(1)

    def _first(self) -> Failure | None:
        try:
            return self._board.first()
        except (RuntimeError, OSError, ValueError):  # store or folder are gone with the process that owned them, or half gone
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
                if not self._closed.wait(self._grace):
                    os._exit(failure.exit_code)  # an orderly end would wait for ranks that are gone
                return


def show_refusals_plainly() -> None:
    """Let a refusal that nobody catches end the process with its message alone and exit code 2, in a user's own script.

    For what is refused before ranks are connected; from then on a `FailureReporter` decides. Under a launcher rank 0
    prints.
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
            # Not sys.stderr: torch's own hook puts a buffer in its place that a SystemExit never empties.
            print(f"lightning_3d: {refusal}", file=sys.__stderr__, flush=True)
        raise SystemExit(refusal.exit_code)

    hook.shows_refusals = True  # type: ignore[attr-defined]
    hook.previous = previous  # type: ignore[attr-defined]
    sys.excepthook = hook


def _has_outlived_a_failure() -> bool:
    """Whether this process caught a failure that it had posted: the hook of that time is still in place."""
    hook: Any = sys.excepthook
    while hook is not None:
        reporter = getattr(hook, "__self__", None)
        if isinstance(reporter, FailureReporter):
            return reporter._noted is not None
        hook = getattr(hook, "previous", None)
    return False
