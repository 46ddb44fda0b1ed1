"""The corpora of URLs: one process of a node looks at a URL and writes down what is there, the
others read that. NumPy only."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_3d.app.config.data_urls import data_cache
from lightning_3d.app.training.data.concatenation import TokenPart
from lightning_3d.app.training.data.corpus import Corpus, find_at_url, find_corpus
from lightning_3d.app.training.data.shard_manifest import TokenizerIdentity
from lightning_3d.errors import DataError, Lightning3DError
from lightning_3d.ranks.supervisor import can_fork
from lightning_3d.storage.json_file import parse_json, read_text
from lightning_3d.storage.numbers import show_bytes
from lightning_3d.storage.piece_cache import CachedFile, PieceCache, unreachable
from lightning_3d.storage.remote_path import Place
from lightning_3d.storage.steady_path import SteadyPath

_FOLDER = "corpora"
_ATTEMPTS = 5
"""Attempts of a request while somebody waits for the start of training; see `SteadyPath`."""
_REQUESTS = 16


@dataclass(frozen=True)
class Finder:
    """Finds the files of paths and URLs.

    Attributes:
        options: a group `data`, or the attributes of a data module.
        fresh: whether to look at each URL again, instead of reading what a process of this node has
            written down about it.
    """

    options: Mapping[str, Any]
    fresh: bool

    def __call__(self, path: Place, *, hashes: bool = False) -> Corpus:
        """Find and check the files of a path or URL; see `find_corpus`.

        Raises:
            DataError: as `find_corpus`, or the URL cannot be read, or the cache cannot be used.
                ConfigError: the cache is too small.
        """
        if not isinstance(path, SteadyPath):
            assert isinstance(path, Path)
            return find_corpus(path, hashes=hashes)
        cache = data_cache(
            self.options.get("cache_dir"),
            self.options.get("cache_bytes"),
            self.options["sequence_length"],
        )
        cache.prepare()
        name = hashlib.sha256(path.url.encode()).hexdigest()[:32]
        file = cache.folder / _FOLDER / f"{name}.json"
        with cache.locked(f"corpus-{name}.lock", DataError):
            corpus = None if self.fresh or hashes else _read(file)
            if corpus is None:
                corpus = _look(path, hashes)
                with cache.usable(DataError):
                    _write(file, corpus)
        parts = tuple(_with_ends(part, lambda file: _cached(file, cache)) for part in corpus.parts)
        files = [file for part in parts for file in (part, part.ends) if file is not None]
        _require_room(
            cache, sum(file.path.size for file in files if isinstance(file.path, CachedFile))
        )
        return replace(corpus, parts=parts)


def _with_ends(part: TokenPart, change: Callable[[TokenPart], TokenPart]) -> TokenPart:
    """Change a file and the index of its documents."""
    return replace(change(part), ends=None if part.ends is None else change(part.ends))


def _cached(part: TokenPart, cache: PieceCache) -> TokenPart:
    """Let a part be read through the cache."""
    assert isinstance(part.path, SteadyPath) and part.identity is not None
    return replace(part, path=CachedFile(part.path, part.identity[:32], part.size, cache))


def _require_room(cache: PieceCache, needed: int) -> None:
    room, wanted = cache.room(), min(cache.limit, needed)
    if room < wanted:
        raise DataError(
            f"The cache of remote data may take {show_bytes(wanted)}, but the disk of"
            f" {cache.folder} has only {show_bytes(room)} for it. Set a smaller data.cache_bytes,"
            " or data.cache_dir to a folder on another disk."
        )


def _look(url: SteadyPath, hashes: bool) -> Corpus:
    """Look at a URL in a process of its own if this one has a single thread: backends start
    threads, and ranks are forked from here."""
    if not can_fork():
        return _find(url, hashes)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_find_and_send, args=(url, hashes, sender), daemon=True)
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:
        found = DataError(f"{url} cannot be read: the process that looked at it died.")
    process.join()
    if isinstance(found, Exception):
        raise found
    corpus: Corpus = found
    return corpus


def _find_and_send(url: SteadyPath, hashes: bool, sender: Connection) -> None:
    try:
        sender.send(_find(url, hashes))
    except Lightning3DError as error:
        sender.send(error)
    except KeyboardInterrupt:
        pass  # the process that waits reports it


def _find(url: SteadyPath, hashes: bool) -> Corpus:
    """Find the files of a URL, and identify the version of each.

    Raises:
        DataError: see `find_at_url`, or the URL cannot be read.
    """
    steady = replace(url, attempts=_ATTEMPTS)
    try:
        corpus = find_at_url(steady, hashes=hashes)
        with ThreadPoolExecutor(_REQUESTS) as pool:
            parts = tuple(pool.map(lambda part: _with_ends(part, _identified), corpus.parts))
        return replace(corpus, parts=parts)
    except OSError as error:
        raise DataError(f"Training data cannot be read: {unreachable(error)}.") from None


def _identified(part: TokenPart) -> TokenPart:
    """Identify the version of a file. Where the store does not tell versions apart, the hash in the
    manifest does."""
    assert isinstance(part.path, SteadyPath)
    identity = [part.path.url, part.path.facts(), part.identity]
    return replace(
        part,
        path=SteadyPath(part.path.url),
        identity=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
    )


def _read(file: Path) -> Corpus | None:
    """Read what was written down about a URL; None if nothing was, or another version of this
    package wrote it."""
    try:
        entries = parse_json(read_text(file))
        parts = tuple(_part_of(part) for part in entries.pop("parts"))
        tokenizer = entries.pop("tokenizer")
        return Corpus(
            parts=parts, tokenizer=TokenizerIdentity(**tokenizer) if tokenizer else None, **entries
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _part_of(entries: dict[str, Any]) -> TokenPart:
    path, ends = SteadyPath(entries.pop("path")), entries.pop("ends", None)
    return TokenPart(path, **entries, ends=_part_of(ends) if ends else None)


def _entries_of(part: TokenPart) -> dict[str, Any]:
    return {
        **vars(part),
        "path": str(part.path),
        "ends": None if part.ends is None else _entries_of(part.ends),
    }


def _write(file: Path, corpus: Corpus) -> None:
    entries = asdict(replace(corpus, parts=()))
    entries["parts"] = [_entries_of(part) for part in corpus.parts]
    draft = file.with_suffix(".partial")
    file.parent.mkdir(mode=0o700, exist_ok=True)
    draft.write_text(json.dumps(entries), "utf-8")
    os.replace(draft, file)
