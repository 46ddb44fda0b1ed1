"""Tokenize sources into a folder, or continue where an earlier attempt ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from lightning_3d.app.training.data.shard_manifest import (
    NAME,
    Manifest,
    ShardPlace,
    check_shards,
    read_manifest,
)
from lightning_3d.app.training.data.tokenization.encoding import ByteEncoder, Encoded, Encoder
from lightning_3d.app.training.data.tokenization.shard_writer import ShardWriter
from lightning_3d.app.training.data.tokenization.sources import Batch, TextSource
from lightning_3d.errors import ConfigError, DataError, OutOfMemory, plural
from lightning_3d.ranks.progress import task
from lightning_3d.storage.lock import FileLock

SHARD_TOKENS = 1 << 28
"""Largest number of tokens of a shard by default."""

_LOCK = ".lightning_3d.lock"
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Tokenization:
    """What was done.

    Attributes:
        manifest: manifest of the whole folder.
        earlier_shards: shards that were there before.
        tokens: tokens that were made now.
    """

    manifest: Manifest
    earlier_shards: int
    tokens: int


def tokenize(
    sources: Sequence[TextSource],
    encoder: Encoder | ByteEncoder,
    folder: Path,
    *,
    column: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    processes: int = 1,
    patience_seconds: float = 0.0,
) -> Tokenization:
    """Write all documents of the sources into shards of a folder.

    The shards depend on the sources, the tokenizer, the column and `shard_tokens`, not on the
    number of processes or on how often the work was interrupted: it continues after the last shard
    of the manifest.

    Args:
        sources: the documents.
        encoder: the tokenizer.
        folder: folder to write, new or of an earlier attempt with the same arguments.
        column: key or column of the text, to compare with an earlier attempt.
        shard_tokens: largest number of tokens of a shard.
        processes: number of processes that tokenize.
        patience_seconds: time to wait for another process that writes the folder.

    Raises:
        ConfigError: another process still writes the folder, or it has other files.
        DataError: the folder is of other sources or options; a record cannot be read; or there is
            no document.
    """
    settings: dict[str, Any] = {"column": column, "shard_tokens": shard_tokens}
    settings["sources"] = [state for source in sources for state in source.state()]
    wanted = Manifest(False, encoder.dtype.name, encoder.identity, settings, next=ShardPlace())
    with _hold(folder, patience_seconds):
        manifest = _earlier(folder, wanted) or wanted
        if manifest.next is None:
            return Tokenization(manifest, len(manifest.shards), 0)
        writer = ShardWriter(folder, manifest, shard_tokens)
        try:
            _write_all(writer, sources, encoder, manifest.next, processes)
        finally:
            writer.abandon()
        done = _completed(writer.manifest, sources)
        done.write(folder)
    return Tokenization(done, len(manifest.shards), done.tokens - manifest.tokens)


def _write_all(
    writer: ShardWriter,
    sources: Sequence[TextSource],
    encoder: Encoder | ByteEncoder,
    start: ShardPlace,
    processes: int,
) -> None:
    batches = _batches(sources, start)
    with task("tokenizing", None, "tokens") as advance:
        for number, (place, encoded) in enumerate(encoded_in_order(encoder, batches, processes)):
            writer.add(replace(place, skip=start.skip if number == 0 else 0), encoded)
            advance(len(encoded.tokens))
        writer.finish()


def _batches(sources: Sequence[TextSource], start: ShardPlace) -> Iterator[Batch]:
    here = sources[start.source :]
    return chain.from_iterable(
        source.batches(start if source.number == start.source else ShardPlace(source.number))
        for source in here
    )


def _completed(manifest: Manifest, sources: Sequence[TextSource]) -> Manifest:
    """Finish the manifest. Times of files no longer matter, and would differ between copies of
    them."""
    if not manifest.shards:
        count = sum(len(source.state()) for source in sources)
        raise DataError(f"The {plural(count, 'source')} {'has' if count == 1 else 'have'} no text.")
    settings = manifest.settings | {"sources": _without_times(manifest.settings["sources"])}
    return replace(manifest, complete=True, settings=settings, next=None)


def _without_times(sources: list[list[Any]]) -> list[list[Any]]:
    return [state[:2] if len(state) == 3 else state for state in sources]


def _earlier(folder: Path, wanted: Manifest) -> Manifest | None:
    """Read the manifest of an earlier attempt, if there is one."""
    if not (folder / NAME).exists():
        others = sorted(
            path.name
            for path in folder.iterdir()
            if not path.name.startswith((".", "shard-00000."))
        )
        if others:
            raise ConfigError(
                f"--out {folder} holds other files, for example {others[0]}. Use a new folder."
            )
        return None
    manifest = read_manifest(folder)
    settings = dict(wanted.settings)
    if manifest.complete:
        settings["sources"] = _without_times(settings["sources"])
    pairs = [(key, manifest.settings.get(key), value) for key, value in settings.items()]
    pairs.append(
        ("tokenizer", replace(manifest.tokenizer, name=""), replace(wanted.tokenizer, name=""))
    )
    different = [key for key, earlier, now in pairs if earlier != now]
    if different:
        words = {
            "sources": "other sources, or they have changed",
            "tokenizer": f"another tokenizer, {manifest.tokenizer}",
        }
        words["shard_tokens"] = (
            f"another size of shards, {manifest.settings.get('shard_tokens')} tokens"
        )
        words["column"] = f"another column, {manifest.settings.get('column')}"
        raise DataError(
            f"--out {folder} has {plural(len(manifest.shards), 'shard')} of {words[different[0]]}."
            " Use a new folder, or the earlier arguments."
        )
    check_shards(folder, replace(manifest, complete=True), manifest.shards)
    return manifest


@contextmanager
def _hold(folder: Path, patience_seconds: float) -> Iterator[None]:
    """Make a folder and hold its lock; remove a folder that is still empty at the end."""
    new = not folder.exists()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder} is a file; give the name of a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    deadline = time.monotonic() + patience_seconds
    while not lock.acquire():
        if time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            continue
        raise ConfigError(
            f"--out {folder}: another process is writing this folder. Wait for it, or use a new"
            " folder."
        )
    try:
        yield
    finally:
        lock.release(remove=True)
        if new:
            with suppress(OSError):
                folder.rmdir()


# Work on batches in several processes, with the results in order and a bounded number of batches in
# flight.

_IN_FLIGHT = 4
"""Batches per process that wait or are in work."""

_encode: Callable[[Batch], Encoded]


def encoded_in_order(
    encode: Callable[[Batch], Encoded], batches: Iterator[Batch], processes: int
) -> Iterator[tuple[ShardPlace, Encoded]]:
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
    pending: deque[tuple[ShardPlace, Future[Encoded]]] = deque()
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


def _take(pending: deque[tuple[ShardPlace, Future[Encoded]]]) -> tuple[ShardPlace, Encoded]:
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
