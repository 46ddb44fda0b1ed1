"""URLs of training data, and the cache that they are read through: what the configuration alone shows. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_3d.config.secrets import check_secrets
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.storage.numbers import show_bytes
from lightning_3d.storage.piece_cache import PieceCache
from lightning_3d.storage.remote_path import Place, RemotePath, place
from lightning_3d.storage.steady_path import SteadyPath
from lightning_3d.storage.user_cache import default_cache

CACHE_BYTES = 16e9
"""Default limit of the cache."""
SMALLEST_CACHE = 2**20
_WIDEST_ID = 4
"""Bytes of an id at most, as `lightning-3d tokenize` writes them."""


def is_url(path: Any) -> bool:
    """Check whether a path of `data=tokens` is a URL, `file://` included."""
    return "://" in str(path)


def data_place(path: Any) -> Place:
    """Return a path of `data=tokens`: a URL as `SteadyPath`, except `file://`, and a path as it is."""
    found = place(path) if is_url(path) else Path(path)
    return SteadyPath(found.url) if isinstance(found, RemotePath) else found


def data_cache(folder: Any, limit: float | None, sequence_length: int) -> PieceCache:
    """Return the cache of remote data.

    Args:
        folder: `data.cache_dir`; None: `lightning_3d/pieces` in the user's cache folder.
        limit: `data.cache_bytes`; None: `CACHE_BYTES`.
        sequence_length: tokens of a sample.

    Raises:
        ConfigError: the limit is too small.
    """
    limit = CACHE_BYTES if limit is None else limit
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not SMALLEST_CACHE <= limit < 2**62:
        raise ConfigError(f"data.cache_bytes must be at least {SMALLEST_CACHE} (1 MiB), for example 16e9; got {limit!r}.")
    path = default_cache() / "pieces" if folder is None else Path(folder)
    cache = PieceCache.of(path.absolute(), int(limit), sequence_length * _WIDEST_ID)
    if 4 * cache.piece > limit:
        raise ConfigError(
            f"data.cache_bytes={limit:.0f} holds fewer than 4 pieces of {show_bytes(cache.piece)}, the least for samples of"
            f" {sequence_length} tokens. Use at least {4 * cache.piece}."
        )
    return cache


def check_data_urls(data: Mapping[str, Any]) -> None:
    """Check the URLs of a group `data` and the options of their cache. Does nothing without a URL.

    Raises:
        ConfigError: a URL has a secret in it, is a pattern, or needs a package that is not installed; or the cache is too small.
    """
    found = [(key, url) for key, url in _paths(data) if is_url(url)]
    for key, url in found:
        _check_url(key, url)
    if found:
        data_cache(data.get("cache_dir"), data.get("cache_bytes"), data["sequence_length"])


def _paths(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each path."""
    groups = {"data": data} if data.get("name") == "tokens" else {}
    if data.get("name") == "blend" and isinstance(data.get("sources"), Mapping):
        groups = {f"data.sources.{name}": source for name, source in data["sources"].items() if isinstance(source, Mapping)}
    for group, entries in groups.items():
        yield from ((f"{group}.{key}", entries[key]) for key in ("train_path", "val_path") if isinstance(entries.get(key), str))


def _check_url(key: str, url: str) -> None:
    check_secrets({key: url})
    path = data_place(url)
    if not isinstance(path, SteadyPath):
        return
    if "?" in url and path.protocol in ("http", "https"):
        raise ConfigError(
            f"{key} has a query ({url.partition('?')[0]}?...), and the files next to it would have none. Use a URL without a query."
        )
    if any(sign in url.partition("://")[2].partition("/")[2] for sign in "*?["):
        raise ConfigError(f"{key}={url} is a pattern. Patterns are for the local disk: name a folder of shards or a .bin file.")
    try:
        path.require_backend()
    except CheckpointError as error:
        raise ConfigError(f"{key}={error}") from None
