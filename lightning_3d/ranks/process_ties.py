"""Tie processes to the one that started them, so that they end with it, however it ends.

The kernel kills a process whose parent has died (Linux, `prctl(PR_SET_PDEATHSIG)`). The request is
made between fork and exec, so that no process ever runs without it, and it holds while C++ code
waits in a rendezvous. It is tied to the *thread* that forked: a thread that starts a process must
live as long as the process.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import util
from typing import Any

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
_POLL_SECONDS = 1.0
_CANNOT_EXECUTE = 126
_ends_workers = 0
# Looked up before any fork: in a forked child, a lock of the loader may be held forever by a thread
# that no longer exists.
_prctl: Callable[..., int] | None = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies (Linux). Ends this process if `parent`
    is no longer its parent."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


def outlive_parent() -> None:
    """Undo `die_with`, in the same thread, for a process that notices by itself and has something
    to report."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def belong_to(parent: int) -> None:
    """Die with the parent, and lead a process group, so that this process and what it starts can be
    killed together."""
    die_with(parent)
    os.setpgid(0, 0)


@contextlib.contextmanager
def tied_interpreters() -> Iterator[None]:
    """Tie the interpreters that `multiprocessing` starts inside this context to this process,
    before they run any Python code. Otherwise they would not notice the end of this process during
    the seconds that their imports take. `multiprocessing.util.spawnv_passfds` (Python 3.11 to
    3.14), which cannot call a function before exec, is replaced meanwhile.
    """
    from multiprocessing import resource_tracker

    # a process that all of them share: start it before the tied ones
    resource_tracker.ensure_running()
    module: Any = util
    before, parent = module.spawnv_passfds, os.getpid()

    def start(path: bytes, arguments: list[str], descriptors: Sequence[int]) -> int:
        with warnings.catch_warnings():
            # about forking with threads: this child executes another program at once
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid > 0:
            return pid
        try:
            belong_to(parent)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, True)
            os.execv(path, arguments)
        finally:
            os._exit(_CANNOT_EXECUTE)

    module.spawnv_passfds = start
    try:
        yield
    finally:
        module.spawnv_passfds = before


def tie_workers(loader: Any) -> None:
    """Let the worker processes of a DataLoader end within seconds after this process, also while
    they read a sample, and not before it.

    torch's workers check for their parent only between two batches. A signal that a launcher, a
    terminal or SLURM sends to all processes of a run must not end them: the ranks need them until
    they have finished their step and saved.
    """
    global _ends_workers
    if _ends_workers != os.getpid():
        _ends_workers = os.getpid()
        util.Finalize(None, _end_workers, exitpriority=0)
    given = getattr(loader, "worker_init_fn", None)
    if getattr(loader, "num_workers", 0) > 0 and getattr(given, "func", None) is not _begin_worker:
        loader.worker_init_fn = partial(_begin_worker, os.getpid(), given)


def _end_workers() -> None:
    """End the daemons of this process at its end. `multiprocessing` sends SIGTERM and waits, for
    ever where they ignore it."""
    if threading.current_thread() is threading.main_thread():
        # torch's handler raises when a worker is killed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    daemons = [process for process in multiprocessing.active_children() if process.daemon]
    for process in daemons:
        process.terminate()
    deadline = time.monotonic() + _POLL_SECONDS
    for process in daemons:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


def _begin_worker(parent: int, given: Callable[[int], None] | None, number: int) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            # a handler: programs that a worker starts would inherit an ignored signal
            signal.signal(signum, _leave_to_parent)
            signal.siginterrupt(signum, False)
    threading.Thread(
        target=_follow, args=(parent,), name="lightning_3d-parent", daemon=True
    ).start()
    if given is not None:
        given(number)


def _leave_to_parent(signum: int, frame: Any) -> None:
    """Do nothing: the rank that this worker reads for decides when it ends."""


def _follow(parent: int) -> None:
    """End this process when another one has ended, which need not be its parent: a fork server can
    start workers."""
    while not _has_ended(parent):
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _has_ended(process: int) -> bool:
    if os.getppid() == process:
        return False
    with contextlib.suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
    return False
