"""The failure of a rank: its cause, its exit code and its message. Imports no torch."""

from __future__ import annotations

import signal
import threading
import time
import traceback
from dataclasses import dataclass

from lightning_3d.errors import Lightning3DError
from lightning_3d.ranks.memory_kills import MEMORY_RAN_OUT

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
    """The failure of a rank, as it is posted for the others.

    Attributes:
        rank: global rank that failed.
        exit_code: 2 for a mistake that the user can repair, 1 for everything else.
        text: the message alone, or a traceback.
        lost_peer: whether it may only be the consequence of another rank's failure.
        time: seconds since the epoch.
        plain: whether the text is our own message, which is shown alone.
        others_hang: whether the other ranks cannot end in order, because they wait for one that is
            gone or hangs.
    """

    rank: int
    exit_code: int
    text: str
    lost_peer: bool
    time: float
    plain: bool = False
    others_hang: bool = False

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """Describe an exception."""
        error = cause_of(error)
        code = exit_code_of(error)
        refused = isinstance(error, Lightning3DError)
        text = str(error) if refused else "".join(traceback.format_exception(error)).rstrip()
        return cls(rank, code, text, not refused and is_lost_peer(error), time.time(), refused)

    def message(self, world_size: int) -> str:
        """Write the message that is printed, once for the whole run."""
        if self.plain or self.exit_code == Lightning3DError.exit_code:
            return f"lightning_3d: {self.text}"
        reason = (
            " because another rank disappeared without an error (killed or out of memory?)"
            if self.lost_peer
            else ""
        )
        return f"lightning_3d: rank {self.rank} of {world_size} failed{reason}:\n{self.text}"


def cause_of(error: BaseException) -> BaseException:
    """Return the user's mistake that caused an exception, else the exception itself.

    Objects that are half built when a mistake is found may raise again while they are torn down,
    and hide it.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Lightning3DError):
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return seen or error


def exit_code_of(error: BaseException) -> int:
    """Return 2 for a mistake of the user, the code of a `SystemExit`, 128 + n after an interrupt or
    signal n, else 1."""
    if isinstance(error, Lightning3DError):
        return error.exit_code
    if (number := ending_signal(error)) is not None:
        return 128 + number
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return error.code or 0
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def ending_signal(error: BaseException) -> int | None:
    """Return the signal that ended a fit in order, between two steps; None for any other
    exception."""
    is_one = any(kind.__name__ == "SIGTERMException" for kind in type(error).__mro__)
    return int(getattr(error, "signal_number", signal.SIGTERM)) if is_one else None


def is_lost_peer(error: BaseException) -> bool:
    """Check whether an exception, or one that it was raised from, means that another rank is gone
    or that this one was asked to end.

    torch reports lost ranks by a RuntimeError. An OSError is about a file, a pipe or a connection
    of the user's own.
    """
    seen: BaseException | None = error
    while seen is not None:
        names = {kind.__name__ for kind in type(seen).__mro__}
        text = "" if isinstance(seen, OSError) else str(seen).lower()
        if names.intersection(_NETWORK_ERRORS + _ENDINGS) or any(
            phrase in text for phrase in _LOST_PEER
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def silent_end(exit_code: int, *, memory_kill: bool = False) -> str:
    """Describe the end of a rank that reported no error.

    Args:
        exit_code: as `subprocess` returns it.
        memory_kill: whether the kernel has killed a process of this machine for lack of memory
            meanwhile.
    """
    how = (
        f"it was killed by {signal.Signals(-exit_code).name}"
        if exit_code < 0
        else f"it exited with code {exit_code}"
    )
    hint = ""
    if exit_code == -signal.SIGKILL:
        hint = f", because the machine {MEMORY_RAN_OUT}," if memory_kill else " (out of memory?)"
    return f"{how}{hint} and reported no error."


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on, so that a process that has failed ends by itself.

    Lightning's handler of SIGTERM broadcasts a tensor (2.6,
    `_SignalConnector._sigterm_notifier_fn`), which raises or waits when the other ranks are gone,
    wherever this process happens to be.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
