"""Work on batches in several processes, with the results in order and a bounded number of batches
in flight."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import Any

from lightning_3d.app.training.data.shard_manifest import Place
from lightning_3d.app.training.data.tokenization.encoding import Encoded
from lightning_3d.app.training.data.tokenization.sources import Batch
from lightning_3d.errors import OutOfMemory

_IN_FLIGHT = 4
"""Batches per process that wait or are in work."""

_encode: Callable[[Batch], Encoded]


def encoded_in_order(
    encode: Callable[[Batch], Encoded], batches: Iterator[Batch], processes: int
) -> Iterator[tuple[Place, Encoded]]:
    """Encode batches. Yields (place of the batch, its tokens) in the order of `batches`, whatever
    the number of processes.

    Args:
        processes: 1 works in this process.

    Raises:
        OutOfMemory: a process was killed.
    """
    if processes == 1:
        for batch in batches:
            yield batch.place, encode(batch)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (encode,))
    pending: deque[tuple[Place, Future[Encoded]]] = deque()
    try:
        for batch in batches:
            pending.append((batch.place, pool.submit(_work, batch)))
            if len(pending) >= _IN_FLIGHT * processes:
                yield _take(pending)
        while pending:
            yield _take(pending)
    except BrokenProcessPool:
        raise OutOfMemory(
            "A process that tokenizes was killed, probably because memory ran out. Repeat the"
            f" command with fewer processes than {processes} (--processes); it continues after the"
            " last shard."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _take(pending: deque[tuple[Place, Future[Encoded]]]) -> tuple[Place, Encoded]:
    place, future = pending.popleft()
    return place, future.result()


def _begin(encode: Callable[[Batch], Encoded]) -> None:
    """Prepare a process: it encodes with one thread, leaves Ctrl-C to its parent, and ends with it,
    however that ends."""
    global _encode
    _encode = encode
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: Any) -> None:
    wait([sentinel])
    os._exit(1)


def _work(batch: Batch) -> Encoded:
    return _encode(batch)
