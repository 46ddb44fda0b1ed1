"""Processes that are forked while threads of their parent are inside a library: they find no lock
that a thread held."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from lightning_3d.storage.fork_gate import FORKS
from lightning_3d.storage.piece_cache import CachedFile, PieceCache
from lightning_3d.storage.remote_path import RemotePath
from lightning_3d.storage.steady_path import SteadyPath

PIECE = 2**16
PATIENCE = 30
"""Seconds after which a reader counts as hanging."""
LOCK, HELD = threading.Lock(), threading.Event()


class LockedStore(AbstractFileSystem):
    """A backend that holds a lock of its module during a request, as those of object stores do."""

    protocol = "locked"

    def cat_file(self, path: str, start: int = 0, end: int = 0, **kwargs: Any) -> bytes:
        with LOCK:
            HELD.set()
            time.sleep(0.5)
            return bytes(end - start)


SLOW_MODULE = """
import time
from fsspec.spec import AbstractFileSystem
time.sleep(0.5)
class Store(AbstractFileSystem):
    protocol = "slowly"
    def cat_file(self, path, start=0, end=0, **kwargs):
        return bytes(end - start)
"""


def forked(work: Callable[[], object]) -> int | None:
    """Run a function in a forked process. Returns its exit code; None: it hangs, and was killed."""
    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()
    process.join(PATIENCE)
    code = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def while_a_thread_reads(read: Callable[[], object], started: Callable[[], bool]) -> int | None:
    """Fork a process that reads while a thread of this one reads. Returns as `forked`."""
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    deadline = time.monotonic() + PATIENCE
    while not started() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert started()
    code = forked(read)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return code


@pytest.mark.parametrize("pieces", [(3, 3), (3, 4)], ids=["same", "other"])
def test_a_reader_of_pieces_that_is_forked_while_a_thread_fetches_one(
    pieces: tuple[int, int], tmp_path: Path
) -> None:
    fsspec.register_implementation("locked", LockedStore, clobber=True)
    cache = PieceCache(tmp_path, 2**20, PIECE)
    cache.prepare()
    file = CachedFile(SteadyPath("locked://x", attempts=1), "0" * 32, 64 * PIECE, cache)
    parent = os.getpid()
    HELD.clear()

    def read() -> None:
        assert file.piece(pieces[os.getpid() != parent]) == bytes(PIECE)

    assert while_a_thread_reads(read, HELD.is_set) == 0


def test_a_reader_that_is_forked_while_a_thread_imports_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_store_of_a_test.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    fsspec.register_implementation("slowly", "slow_store_of_a_test.Store", clobber=True)

    def read() -> None:
        assert SteadyPath("slowly://x", attempts=1).fetch(0, 4) == bytes(4)

    try:
        assert while_a_thread_reads(read, lambda: "slow_store_of_a_test" in sys.modules) == 0
    finally:
        sys.modules.pop("slow_store_of_a_test", None)


def test_an_upload_keeps_forks_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("locked", LockedStore, clobber=True)
    HELD.clear()

    class File:
        def write(self, data: bytes) -> None:
            LockedStore().cat_file("x")

        def close(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(LockedStore, "open", lambda *arguments, **options: File(), raising=False)

    def write() -> None:
        RemotePath("locked://y").write_bytes(b"data")

    assert while_a_thread_reads(write, HELD.is_set) == 0


def test_a_thread_that_is_inside_may_enter_again_and_fork() -> None:
    def enter() -> None:
        with FORKS.closed():
            pass

    with FORKS.closed(), FORKS.closed():
        assert forked(enter) == 0
    assert forked(enter) == 0


def test_a_fork_does_not_wait_for_ever_for_a_request_that_never_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FORKS, "longest", 0.1)
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with FORKS.closed():
            inside.set()
            leave.wait(PATIENCE)

    def enter() -> None:
        with FORKS.closed():
            pass

    thread = threading.Thread(target=stay, daemon=True)
    thread.start()
    assert inside.wait(PATIENCE)
    try:
        assert forked(enter) == 0
        assert thread.is_alive() and not leave.is_set()
    finally:
        leave.set()
        thread.join(PATIENCE)


HOOKS = """
import os, threading, time
from lightning_3d.storage.fork_gate import FORKS
from concurrent.futures import ThreadPoolExecutor
inside, done = threading.Event(), threading.Event()
def work():
    with FORKS.closed():
        inside.set()
        time.sleep(0.2)
        ThreadPoolExecutor(1).submit(int).result()
        done.set()
threading.Thread(target=work, daemon=True).start()
inside.wait()
child = os.fork()
if not child:
    os._exit(0)
print(done.is_set())
"""


def test_a_fork_waits_without_the_locks_of_other_hooks() -> None:
    """`concurrent.futures` holds a lock from before a fork on, which each use of a pool needs."""
    found = subprocess.run(
        [sys.executable, "-c", HOOKS], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout == "True\n", "the thread was done before the fork"


def test_forks_of_several_threads_take_turns() -> None:
    codes: list[int | None] = []
    threads = [
        threading.Thread(target=lambda: codes.append(forked(lambda: None)), daemon=True)
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert codes == [0] * 4
