"""The failure of a rank: its cause, its exit code and its message. Imports no torch."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from dataclasses import dataclass

from lightning_3d.errors import Lightning3DError

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
