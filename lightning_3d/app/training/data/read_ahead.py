"""Fetching what will be read next: the order of samples is known, so their pieces are fetched
before a loader asks for them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

from lightning_3d.app.training.data.packing import Samples
from lightning_3d.errors import Lightning3DError
from lightning_3d.storage.piece_cache import THREADS, Piece, PieceCache


def read_ahead(samples: Samples, order: Iterator[int], rows: int) -> Iterator[int]:
    """Yield the samples of an order, and fetch the pieces of the next ones in threads meanwhile.

    Errors are left to the reader, which meets them again. The threads end with the iterator.

    Args:
        rows: samples by which the threads are ahead.
    """
    coming: deque[int] = deque()
    pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
    stopped = threading.Event()
    threads = [
        threading.Thread(target=_fetch, args=(pieces, stopped), name="read ahead", daemon=True)
        for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        for index in order:
            coming.append(index)
            for piece in samples.pieces(index):
                pieces.put(piece)
            if len(coming) > rows:
                yield coming.popleft()
        yield from coming
    finally:
        stopped.set()
        for _ in threads:
            pieces.put(None)


def _fetch(pieces: queue.SimpleQueue[Piece | None], stopped: threading.Event) -> None:
    while (piece := pieces.get()) is not None and not stopped.is_set():
        file, number = piece
        with suppress(Lightning3DError, OSError):
            file.fetch(number)


def rows_ahead(cache: PieceCache, batch: int, ranks: int) -> int:
    """Choose by how many samples to fetch ahead.

    Four batches of a rank, but not more than half of the cache holds for the ranks of a node, so
    that nothing is removed before it is read. A sample may be in two pieces.

    Args:
        batch: samples of a rank per step.
        ranks: ranks of this node.
    """
    return max(1, min(4 * batch, cache.limit // (4 * cache.piece * ranks)))
