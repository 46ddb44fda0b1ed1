"""wandb's own process on this machine, which takes what is logged. One that does not answer would keep the training waiting for ever."""

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
    """End the process where what is called inside takes longer, so that the call fails instead of waiting on.

    Raises:
        TimeoutError: it took longer.
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
            raise TimeoutError(f"its process on this machine did not answer for {seconds:g} seconds and was ended.") from error
        raise
    finally:
        timer.cancel()


def services() -> list[psutil.Process]:
    """wandb's processes that this one has started, and that have not ended."""
    children = psutil.Process(os.getpid()).children()
    return [child for child in children if "wandb" in child.name() and child.status() != psutil.STATUS_ZOMBIE]


def end_service() -> bool:
    """End wandb's processes, at once; whatever they had not yet written or sent is lost. Whether there was one."""
    found = services()
    for process in [inner for service in found for inner in service.children(recursive=True)] + found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(found)


def forget_service() -> None:
    """Keep wandb from looking for a process that has ended when this one ends, which would show a traceback."""
    import wandb

    with contextlib.suppress(Exception):
        wandb.teardown(exit_code=1)


def end_service_after(seconds: float) -> None:
    """When the main thread of this process ends, wandb waits for its own, which gets so long."""

    def wait() -> None:
        threading.main_thread().join()
        time.sleep(seconds)
        if end_service():
            print(f"lightning_3d: Weights & Biases did not end within {seconds:g} seconds and was ended.", file=sys.stderr, flush=True)

    threading.Thread(target=wait, name="end of wandb", daemon=True).start()
