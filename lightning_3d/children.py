"""The ranks that Lightning starts as children of rank 0 when a user runs a script of his own without torchrun.

Lightning's own observer kills rank 0 as soon as a child fails, whatever rank 0 is doing; the shell then sees exit code 137 and
perhaps half a message. `Children` waits for the child's own words instead and speaks for one that left none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from lightning_3d.failures import Failure, FailureReporter, silent_end

PATIENCE_SECONDS = 3.0
"""How long the other ranks may take to learn of a failure by themselves after a child has ended."""


class Children:
    """Watches processes that must all end with 0.

    Args:
        processes: the local ranks 1, 2, ...
        first_rank: global rank of this process, local rank 0.
        world_size: of the run.

    Attributes:
        reporter: tells all ranks of a failure; None until the ranks are connected.
    """

    def __init__(self, processes: Sequence[subprocess.Popen], first_rank: int, world_size: int) -> None:
        self._processes = list(processes)
        self._first_rank = first_rank
        self._world_size = world_size
        self.reporter: FailureReporter | None = None

    def watch(self) -> None:
        """Start watching in a thread."""
        threading.Thread(target=self._watch, name="lightning_3d-children", daemon=True).start()

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
        if code > 0:
            time.sleep(PATIENCE_SECONDS)  # it printed something itself, or posted why; a signal leaves no words
        failure = Failure(rank, 1, silent_end(code), False, time.time())
        if self.reporter is not None:
            self.reporter.speak_for(failure)
        else:
            self._end_unconnected(failure)

    def _end_unconnected(self, failure: Failure) -> None:
        """This process waits in a rendezvous that will never be complete, and cannot be woken."""
        print(failure.message(self._world_size), file=sys.stderr, flush=True)
        for process in self._processes:
            process.kill()
        os._exit(failure.exit_code)
