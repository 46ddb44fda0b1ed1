"""The ranks that Lightning starts as children of rank 0 when a user runs their own script without
torchrun.

Lightning's own observer kills rank 0 as soon as a child fails, whatever rank 0 is doing; the shell
then sees exit code 137 and perhaps half a message. `Children` waits for the child's own message
instead, and reports the failure of a child that left no message. No child outlives rank 0: the
kernel kills them when it dies, and a script waits for them before it ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from lightning_3d.ranks.failure import Failure, silent_end
from lightning_3d.ranks.output import flush_output

PATIENCE_SECONDS = 3.0
"""Time for the other ranks to notice by themselves that one of them failed."""

LAST_SECONDS = 60.0
"""Time for the other ranks to reach the end of the script after rank 0 has."""


_exit_codes: list[int] = []


def _end_with(code: int, said: str) -> None:
    """End this process with an exit code after the script's own functions of `atexit`."""
    _exit_codes.append(code)
    if said:
        print(f"lightning_3d: {said}", file=sys.stderr, flush=True)


# with this module, which a script imports before it registers its own: the last one is called first
@atexit.register
def _exit() -> None:
    if _exit_codes:
        flush_output()
        os._exit(_exit_codes[0])


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
        self._closing = threading.Event()
        self._spoken = False
        self.reporter: Reporter | None = None

    def start(self, begin: Callable[[], Sequence[subprocess.Popen]]) -> None:
        """Start the local ranks 1, 2, ... and watch them, both in a thread that lives as long as
        they do.

        The kernel ties a child to the thread that forked it, and the user may call `fit` in a
        thread that ends. Raises what `begin` raises.
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

        thread = threading.Thread(target=work, name="lightning_3d-children", daemon=True)
        thread.start()
        begun.result()
        # Called after `close`: a thread that is inside a store when the interpreter ends aborts the
        # process.
        atexit.register(thread.join, PATIENCE_SECONDS)
        atexit.register(self.close)

    def close(self) -> None:
        """Wait for the children at the end of the script, and kill those that stay. After a failure
        of this rank they get less time.

        A script whose ranks do not all end with 0 does not end with 0 either, whatever they do
        after their last collective.
        """
        failed = self._has_failed()
        self._closing.set()
        deadline = time.monotonic() + (PATIENCE_SECONDS if failed else LAST_SECONDS)
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self._running()
        for index in left:
            self._processes[index].kill()
        failures = [
            (index, process.returncode)
            for index, process in enumerate(self._processes)
            if process.returncode
        ]
        if failed:
            own = [code for _, code in failures if code > 0]
            # this rank's script caught its exception; another's did not
            if own and getattr(sys, "last_value", None) is None:
                _end_with(own[0], "")
        elif left:
            ranks = ", ".join(str(self._first_rank + index + 1) for index in left)
            _end_with(
                1,
                f"rank{'s' * (len(left) > 1)} {ranks} of {self._world_size} did not end within"
                f" {LAST_SECONDS:g} s after rank {self._first_rank} reached the end of the script,"
                f" and {'were' if len(left) > 1 else 'was'} killed.",
            )
        elif failures:
            index, code = failures[0]
            how = (
                f"exited with code {code}"
                if code > 0
                else f"was killed by {signal.Signals(-code).name}"
            )
            said = (
                f"rank {self._first_rank + index + 1} of {self._world_size} {how} after the last"
                " step that the ranks took together."
            )
            _end_with(max(code, 1), "" if self._spoken else said)

    def _has_failed(self) -> bool:
        """Check whether the script ends by an uncaught exception, or before the ranks were
        connected."""
        return (
            self.reporter is None
            or self.reporter.has_failed
            or getattr(sys, "last_value", None) is not None
        )

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
        rank = self._first_rank + failed + 1
        # It printed or posted the reason itself; after a signal there is none.
        if self._closing.wait(PATIENCE_SECONDS if code > 0 else 0.0):
            return
        self._spoken = True
        failure = Failure(rank, 1, silent_end(code), False, time.time())
        if self.reporter is not None:
            self.reporter.speak_for(failure)
        else:
            self._end_unconnected(failure)

    def _end_unconnected(self, failure: Failure) -> None:
        """End this process, which waits in a rendezvous that will never complete and cannot be
        interrupted."""
        print(failure.message(self._world_size), file=sys.stderr, flush=True)
        for process in self._processes:
            process.kill()
        os._exit(failure.exit_code)
