"""The ranks that Lightning starts as children of rank 0 when a user runs their own script without torchrun.

Lightning's own observer kills rank 0 as soon as a child fails, whatever rank 0 is doing; the shell then sees exit code 137 and perhaps half
a message. `Children` waits for the child's own message instead, and reports the failure of a child that left no message. No child outlives
rank 0: the kernel kills them when it dies, and a script waits for them before it ends.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from lightning_3d.ranks.failure import Failure, silent_end

PATIENCE_SECONDS = 3.0
"""Time for the other ranks to notice by themselves that one of them failed."""

LAST_SECONDS = 60.0
"""Time for the other ranks to reach the end of the script after rank 0 has."""


class Reporter(Protocol):
    """The part of a `FailureReporter` that `Children` needs."""

    @property
    def has_failed(self) -> bool:
        """True once this rank itself has failed."""

    def speak_for(self, failure: Failure) -> None:
        """Report the failure of a rank that ended without an error of its own."""


class Children:
    """Starts and watches processes that must all exit with 0.

    Args:
        first_rank: global rank of this process, which is local rank 0.
        world_size: number of ranks of the run.

    Attributes:
        reporter: reports a failure to all ranks; None until the ranks are connected.
    """

    def __init__(self, first_rank: int, world_size: int) -> None:
        self._processes: list[subprocess.Popen] = []
        self._first_rank = first_rank
        self._world_size = world_size
        self._closing = False
        self.reporter: Reporter | None = None

    def start(self, begin: Callable[[], Sequence[subprocess.Popen]]) -> None:
        """Start the local ranks 1, 2, ... and watch them, both in a thread that lives as long as they do.

        The kernel ties a child to the thread that forked it, and the user may call `fit` in a thread that ends. Raises what `begin` raises.
        """
        begun: Future[None] = Future()

        def work() -> None:
            try:
                self._processes = list(begin())
            except BaseException as error:
                begun.set_exception(error)
                return
            begun.set_result(None)
            self._watch()
            for process in self._processes:
                process.wait()

        threading.Thread(target=work, name="lightning_3d-children", daemon=True).start()
        begun.result()
        atexit.register(self.close)

    def close(self) -> None:
        """Wait for the children at the end of the script, and kill those that stay. After a failure of this rank they get less time."""
        failed = self._has_failed()
        deadline = time.monotonic() + (PATIENCE_SECONDS if failed else LAST_SECONDS)
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self._running()
        if not left:
            return
        self._closing = True
        for index in left:
            self._processes[index].kill()
        if not failed:
            ranks = ", ".join(str(self._first_rank + index + 1) for index in left)
            print(
                f"lightning_3d: rank{'s' * (len(left) > 1)} {ranks} of {self._world_size} did not end within {LAST_SECONDS:g} s after rank"
                f" {self._first_rank} reached the end of the script, and {'were' if len(left) > 1 else 'was'} killed.",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _has_failed(self) -> bool:
        """Check whether the script ends by an uncaught exception, or before the ranks were connected."""
        return self.reporter is None or self.reporter.has_failed or getattr(sys, "last_value", None) is not None

    def _running(self) -> list[int]:
        return [index for index, process in enumerate(self._processes) if process.poll() is None]

    def _watch(self) -> None:
        while True:
            codes = [process.poll() for process in self._processes]
            failed = next((index for index, code in enumerate(codes) if code), None)
            if failed is not None:
                break
            if all(code == 0 for code in codes):
                return
            time.sleep(0.2)
        code = codes[failed]
        assert code is not None
        if self._closing:
            return
        rank = self._first_rank + failed + 1
        if code > 0:
            time.sleep(PATIENCE_SECONDS)  # it printed or posted the reason itself; after a signal there is none
        failure = Failure(rank, 1, silent_end(code), False, time.time())
        if self.reporter is not None:
            self.reporter.speak_for(failure)
        else:
            self._end_unconnected(failure)

    def _end_unconnected(self, failure: Failure) -> None:
        """End this process, which waits in a rendezvous that will never complete and cannot be interrupted."""
        print(failure.message(self._world_size), file=sys.stderr, flush=True)
        for process in self._processes:
            process.kill()
        os._exit(failure.exit_code)
