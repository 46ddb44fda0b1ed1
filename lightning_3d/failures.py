"""One failing rank, one message: who failed first, who prints it, and how the other ranks end.

A rank that raises takes its connections with it, so that within milliseconds the others fail as well, with messages
about closed connections that bury the cause. Every rank therefore posts its failure on a board that all ranks share,
before anything of it is torn down; the first post that is not about a lost peer is the cause and is shown once. The
others end quietly, with its exit code.

The board is a folder where one process supervises the ranks of a machine (`lightning_3d.launch`), and a store that all
ranks reach everywhere else (torchrun, SLURM, a user's own script with Lightning's launcher). Importing this module
imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from lightning_3d.attempts import name_attempt
from lightning_3d.errors import Lightning3DError
from lightning_3d.rendezvous import explained_errors
from lightning_3d.ties import die_with, outlive_parent

FOLDER_VARIABLE = "LIGHTNING_3D_FAILURES"
"""Names the folder that serves as board. Set by the supervisor for its ranks."""

PARENT_VARIABLE = "LIGHTNING_3D_PARENT"
"""Process id of rank 0 in the environment of ranks that it started itself, which must not outlive it."""

ORPHAN_SECONDS = 2.0
"""How long a rank may take to end by itself after rank 0, which had started it, was killed."""

_KEY = "lightning_3d/failure"
_SEEN = "lightning_3d/failure_seen"
_FORGOTTEN = "lightning_3d/failure_forgotten"
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "gloo/transport",
    "gloo connectfullmesh",
    "nccl",
    "failed to recv",
    "process group has been aborted",
)
_NETWORK_ERRORS = ("DistNetworkError", "DistBackendError", "DistStoreError")
_ENDINGS = ("KeyboardInterrupt", "SIGTERMException")


@dataclass(frozen=True)
class Failure:
    """What a rank tells the others.

    Attributes:
        exit_code: 2 for a mistake that the user can repair, 1 for everything else.
        text: what to show: the message alone, or a traceback.
        lost_peer: it may only be the consequence of another rank's failure.
        time: seconds since the epoch.
        plain: the text is a message of our own, which is shown alone.
    """

    rank: int
    exit_code: int
    text: str
    lost_peer: bool
    time: float
    plain: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describe an exception."""
        error = cause_of(error)
        code = exit_code_of(error)
        refused = isinstance(error, Lightning3DError)
        text = str(error) if refused else "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, code, text, not refused and is_lost_peer(error), time.time(), refused)

    def message(self, world_size: int) -> str:
        """What is printed, once for the whole run."""
        if self.plain or self.exit_code == Lightning3DError.exit_code:
            return f"lightning_3d: {self.text}"
        reason = " after it lost a peer that left no word (killed, or out of memory?)" if self.lost_peer else ""
        return f"lightning_3d: rank {self.rank} of {world_size} failed{reason}:\n{self.text}"


def cause_of(error: BaseException) -> BaseException:
    """The mistake of the user that an exception came from, else the exception itself.

    What is half built when a mistake is found may raise again while it is torn down, and hide it.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Lightning3DError):
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return seen or error


def exit_code_of(error: BaseException) -> int:
    """2 for a mistake of the user, what a `SystemExit` carries, 128 + n for an interrupt and where signal n ended a fit, else 1."""
    if isinstance(error, Lightning3DError):
        return error.exit_code
    if (number := ending_signal(error)) is not None:
        return 128 + number
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def ending_signal(error: BaseException) -> int | None:
    """The signal that ended a fit in order, between two steps (see `lightning_compat.ended_by`); None for any other exception."""
    is_one = any(kind.__name__ == "SIGTERMException" for kind in type(error).__mro__)
    return int(getattr(error, "signal_number", signal.SIGTERM)) if is_one else None


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception, or one that it was raised from, says that another rank is gone or that this one was told to
    end.
    """
    seen: BaseException | None = error
    while seen is not None:
        names = {kind.__name__ for kind in type(seen).__mro__}
        text = str(seen).lower()
        if names.intersection(_NETWORK_ERRORS + _ENDINGS) or any(phrase in text for phrase in _LOST_PEER):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def silent_end(exit_code: int) -> str:
    """What can be said of a rank that ended without a word, from its exit code as `subprocess` gives it."""
    how = f"it was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"it ended with exit code {exit_code}"
    hint = " (out of memory?)" if exit_code == -signal.SIGKILL else ""
    return f"{how}{hint} without an error of its own."


def ignore_sigterm() -> None:
    """Let a process that has failed end by itself.

    Lightning's handler of SIGTERM broadcasts a tensor (2.6, `_SignalConnector._sigterm_notifier_fn`), which raises or
    waits when the other ranks are gone, wherever this process happens to be.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Board(Protocol):
    """Where failures are posted. The methods may be called from any thread."""

    def post(self, failure: Failure) -> bool:
        """Post a failure; True when this rank is the one that shows what failed."""

    def first(self) -> Failure | None:
        """The failure that is the cause, None as long as there is none."""

    def forget(self, rank: int) -> None:
        """Begin anew: `rank`, like all others, caught what was posted and trains again."""


class LocalBoard:
    """The board of a single process, which shows its own failure."""

    def post(self, failure: Failure) -> bool:
        return True

    def first(self) -> Failure | None:
        return None

    def forget(self, rank: int) -> None:
        pass


class FolderBoard:
    """One file per failed rank in a folder of this machine. The supervisor shows the cause, so no rank ever does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, failure: Failure) -> bool:
        path = self.folder / f"failure_{failure.rank}.json"
        draft = self.folder / f"draft_{failure.rank}.json"
        draft.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # the first words of a rank count
            os.link(draft, path)
        draft.unlink()  # writing it again would change the post, which is the same file
        return False

    def all(self) -> list[Failure]:
        """Failures of all ranks, earliest first."""
        posts = [Failure(**json.loads(path.read_text("utf-8"))) for path in self.folder.glob("failure_*.json")]
        return sorted(posts, key=lambda failure: failure.time)

    def first(self) -> Failure | None:
        return next(iter(sorted(self.all(), key=lambda failure: failure.lost_peer)), None)

    def forget(self, rank: int) -> None:
        (self.folder / f"failure_{rank}.json").unlink(missing_ok=True)


class StoreBoard:
    """A key of a store that all ranks reach, set by the first rank that fails.

    A rank that only lost a peer waits a moment for the peer's own words before it posts.

    Args:
        store: a `torch.distributed.Store`.
        world_size: of the run.
        serves: this process holds the store's server, so that it must outlive the others' reading.
        patience: seconds to wait for the cause, and for readers.
        lasting: a store that outlives this attempt, where torchrun may start the ranks again.
    """

    def __init__(
        self, store: Any, world_size: int, *, serves: bool = False, patience: float = 3.0, lasting: Any = None
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._serves = serves
        self._patience = patience
        self._lasting = lasting
        self._past = ""

    def post(self, failure: Failure) -> bool:
        try:
            cause = _poll(self.first, self._patience) if failure.lost_peer else self.first()
            if cause is None:
                text = json.dumps(asdict(failure))
                cause = Failure(**json.loads(self._store.compare_set(_KEY, self._past, text)))
            self._store.add(_SEEN, 1)
            if self._serves:
                _poll(lambda: self._store.add(_SEEN, 0) >= self._world_size or None, self._patience)
            return cause.rank == failure.rank
        except RuntimeError:
            # The store is gone with the process that served it, rank 0. Rank 1 speaks for all that are left.
            return failure.rank == 1

    def first(self) -> Failure | None:
        text = self._posted()
        return Failure(**json.loads(text)) if text != self._past else None

    def forget(self, rank: int) -> None:
        """Collective: no rank goes on, and can fail anew, before all have forgotten."""
        self._past = self._posted()
        rounds = -(-self._store.add(_FORGOTTEN, 1) // self._world_size)
        _poll(lambda: self._store.add(_FORGOTTEN, 0) >= rounds * self._world_size or None, 60.0)

    def tell_all(self, key: str, value: str, rank: int) -> str:
        """What rank 0 says under a key, in all ranks. Collective; rank 0 returns when all have read it."""
        key = f"lightning_3d/{key}"
        if rank == 0:
            self._store.set(key, value)
            if self._lasting is not None:
                self._lasting.set(key, value)
        value = self._store.get(key).decode()
        self._store.add(f"{key}/read", 1)
        if rank == 0:
            _poll(lambda: self._store.add(f"{key}/read", 0) >= self._world_size or None, 60.0)
        return value

    def told_before(self, key: str) -> str | None:
        """What rank 0 said last in an attempt before this one."""
        key = f"lightning_3d/{key}"
        return self._lasting.get(key).decode() if self._lasting is not None and self._lasting.check([key]) else None

    def _posted(self) -> str:
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""


def _poll(look: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def connect_board(rank: int, world_size: int) -> Board:
    """The board of this run: the supervisor's folder, else the store at MASTER_ADDR and MASTER_PORT.

    The store is a connection of its own, which the ranks of a world find whether or not the process group is up.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return FolderBoard(Path(folder))
    if world_size == 1 or "MASTER_ADDR" not in os.environ:
        return LocalBoard()
    store, lasting = connect_store(rank, world_size)
    return StoreBoard(store, world_size, serves=rank == 0 and not store_outlives_ranks(), lasting=lasting)


def store_outlives_ranks() -> bool:
    """Whether torchrun serves the store, and keeps it with all that is in it when it starts the ranks again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(rank: int, world_size: int) -> tuple[Any, Any]:
    """A `torch.distributed.Store` at MASTER_ADDR and MASTER_PORT, served by rank 0 or by torchrun: this attempt's part of it, and
    all of it where it outlives the attempt. Collective over the world.

    One connection serves all fits and evaluations of a process: if rank 0 let go of it in between, the others could reach a
    server that is just closing.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _store_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, world_size, restarts)


@lru_cache(maxsize=1)
def _store_at(address: str, port: str, rank: int, world_size: int, restarts: str) -> tuple[Any, Any]:
    from torch.distributed import PrefixStore, rendezvous

    with explained_errors(rank):
        store, _, _ = next(rendezvous("env://", rank, world_size))
    if not store_outlives_ranks():
        return PrefixStore("lightning_3d", store), None
    return PrefixStore(name_attempt(store, rank, world_size), store), store


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
