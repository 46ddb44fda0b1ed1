"""Whole runs that are started one after the other as a launcher does, from one warm process. Their
ranks may be killed.

`run_ranks` keeps its ranks from one call to the next. Here `in_fresh_process` forks a process from
the same warm server, and `start` in it forks ranks as `lightning-3d train` does, but leaves them
alone: nobody tells them that one of them is dead.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ranks import server_environment

from lightning_3d.ranks.boards import FolderBoard
from lightning_3d.ranks.supervisor import Ranks

PATIENCE_SECONDS = 90.0
"""How long ranks may run on after one of them has died. They end within a second or two; the
machine may be busy."""
_LOG_TAIL_BYTES = 3000
# <sched.h>, <sys/mount.h>
_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE = 0x20000, 0x1, 0x20, 0x4000, 0x40000


def in_fresh_process(fn: Callable[..., Any], *args: Any, timeout: float = 250) -> Any:
    """Call a module-level function in a process with one thread, in which torch and its friends are
    imported already."""
    payload = pickle.dumps((fn, args))
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(
        target=_serve, args=(there, payload, tuple(sys.path))
    )
    with server_environment():
        process.start()
    there.close()
    try:
        if not here.poll(timeout):
            raise TimeoutError(f"{fn.__name__} has not returned after {timeout:g} s")
        try:
            ok, result = here.recv()
        except EOFError:
            process.join(10)
            raise AssertionError(
                f"the process of {fn.__name__} ended with exit code {process.exitcode}"
            ) from None
    finally:
        process.kill()  # its ranks die with it
        process.join()
        here.close()
    if not ok:
        raise AssertionError(result)
    return result


def _serve(pipe: connection.Connection, payload: bytes, search_path: tuple[str, ...]) -> None:
    sys.path[:] = search_path
    fn, args = pickle.loads(payload)
    try:
        pipe.send((True, fn(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


@dataclass(frozen=True)
class Ended:
    """How the ranks of a start ended.

    Attributes:
        codes: of each rank; -9 after SIGKILL.
        output: of each rank.
        told: what ranks posted, which the supervisor would show.
    """

    codes: list[int]
    output: list[str]
    told: list[str]

    def __str__(self) -> str:
        each = enumerate(zip(self.codes, self.output, strict=True))
        return "\n".join(
            [
                *self.told,
                *(
                    f"--- rank {rank} ended with {code}:\n{text[-_LOG_TAIL_BYTES:]}"
                    for rank, (code, text) in each
                ),
            ]
        )


def start(job: Callable[..., None], arguments: tuple[Any, ...], count: int, logs: Path) -> Ended:
    """Run `job(*arguments)` in new ranks and wait until all have ended by themselves. In a process
    of `in_fresh_process`.

    Raises:
        AssertionError: ranks, or processes that they started, go on after one of them has died.
    """
    logs.mkdir(parents=True)
    ranks = Ranks(_job, (logs, job, arguments), count, logs, fork=True, threads=1)
    ranks.start(logs)
    try:
        deadline = None
        while ranks.running:
            ranks.wait(0.5)
            if deadline is None and any(code for _, code in ranks.ended.values()):
                deadline = time.monotonic() + PATIENCE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                ranks.send(signal.SIGUSR2)
                time.sleep(1)
                output = "\n".join(_output(logs, rank) for rank in ranks.running)
                raise AssertionError(
                    f"{PATIENCE_SECONDS:g} s after a rank has died, ranks {ranks.running} go"
                    f" on:\n{output}"
                )
        for process in ranks.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, 0)
                raise AssertionError(f"{process.name} has left a process behind")
    finally:
        ranks.stop(0.0)
    told = [failure.message(count) for failure in FolderBoard(logs).all()]
    return Ended(
        [ranks.ended[rank][1] for rank in range(count)],
        [_output(logs, rank) for rank in range(count)],
        told,
    )


def _output(logs: Path, rank: int) -> str:
    path = logs / f"rank_{rank}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def _job(logs: Path, job: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """In a rank: rank 0 too prints into a file, and SIGUSR2 shows what all threads are doing."""
    descriptor = os.open(
        logs / f"rank_{os.environ['RANK']}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND
    )
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.register(signal.SIGUSR2, file=2)
    job(*arguments)


@contextlib.contextmanager
def small_disk(where: Path, size: int) -> Iterator[None]:
    """Mount a file system in memory of so many bytes, which only this process and those that it
    starts see.

    Raises:
        PermissionError: this machine does not permit it.
    """
    where.mkdir(exist_ok=True)
    if _libc.unshare(_CLONE_NEWNS):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _mount(b"none", os.fsencode(where), b"tmpfs", 0, f"size={size}".encode())
    try:
        yield
    finally:
        _libc.umount2(os.fsencode(where), 2)  # MNT_DETACH


def read_only(where: Path) -> None:
    """Let nothing more be written to a `small_disk`."""
    _mount(b"none", os.fsencode(where), b"tmpfs", _MS_REMOUNT | _MS_RDONLY, None)


_libc = ctypes.CDLL(None, use_errno=True)


def _mount(
    source: bytes | None, target: bytes, kind: bytes | None, flags: int, options: bytes | None
) -> None:
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), options):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
