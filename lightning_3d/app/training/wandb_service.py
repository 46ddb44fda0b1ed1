"""wandb's own process on this machine, which receives what is logged, and limits on how long a call
may wait for it.

Without them a process that hangs also hangs training. Measured with wandb's process stopped
(SIGSTOP) and `finish_timeout=2`: `run.finish()` had not returned after 90 s; inside
`answered_within(4)` it fails after 4.1 s and training continues.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator

import psutil


@contextlib.contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """End wandb's process if the block takes longer, so that the call inside fails instead of
    waiting.

    Raises:
        TimeoutError: the block took longer.
    """
    late = threading.Event()

    def end() -> None:
        late.set()
        end_service()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if late.is_set():
            raise TimeoutError(
                f"its process on this machine did not answer for {seconds:g} seconds and was ended."
            ) from error
        raise
    finally:
        timer.cancel()


def services() -> list[psutil.Process]:
    """List wandb's running processes that this process started."""
    children = psutil.Process(os.getpid()).children()
    return [
        child
        for child in children
        if "wandb" in child.name() and child.status() != psutil.STATUS_ZOMBIE
    ]


def end_service() -> bool:
    """Kill wandb's processes; what they had not yet written or sent is lost. Returns whether there
    was one."""
    found = services()
    for process in [
        inner for service in found for inner in service.children(recursive=True)
    ] + found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(found)


def forget_service() -> None:
    """Make wandb forget a process that has ended; otherwise it shows a traceback when this process
    ends."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=1)


def end_service_after(seconds: float) -> None:
    """Limit the time that wandb waits for its process after the main thread of this process has
    ended."""

    def wait() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        if end_service():
            said = (
                f"lightning_3d: Weights & Biases did not exit within {seconds:g} seconds and was"
                " killed."
            )
            print(said, file=sys.stderr, flush=True)

    threading.Thread(target=wait, name="end of wandb", daemon=True).start()
