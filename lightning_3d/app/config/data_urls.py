"""URLs of training data, and the cache that they are read through: what the configuration alone
shows. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_3d.app.config.secrets import check_secrets
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.storage.numbers import show_bytes
from lightning_3d.storage.piece_cache import PieceCache
from lightning_3d.storage.remote_path import WEB, Place, RemotePath, place
from lightning_3d.storage.steady_path import SteadyPath
from lightning_3d.storage.user_cache import default_cache

CACHE_BYTES = 16e9
"""Default limit of the cache."""
SMALLEST_CACHE = 2**20
_WIDEST_ID = 4
"""Bytes of an id at most, as `lightning-3d tokenize` writes them."""


def path_list(value: Any) -> list[Any]:
    """Return the paths of a value of `train_path` or `val_path`, which is a path or a list of them;
    None has none."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def is_url(path: Any) -> bool:
    """Check whether a path of `data=tokens` is a URL, `file://` included."""
    return "://" in str(path)


def has_url(*values: Any) -> bool:
    """Check whether one of these values of `train_path` and `val_path` has a URL."""
    return any(is_url(path) for value in values for path in path_list(value))


def data_place(path: Any) -> Place:
    """Return a path of `data=tokens`: a URL as `SteadyPath`, except `file://`, and a path as it
    is."""
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
    if (
        isinstance(limit, bool)
        or not isinstance(limit, int | float)
        or not SMALLEST_CACHE <= limit < 2**62
    ):
        raise ConfigError(
            f"data.cache_bytes must be at least {SMALLEST_CACHE} (1 MiB), for example 16e9; got"
            f" {limit!r}."
        )
    path = default_cache() / "pieces" if folder is None else Path(folder)
    cache = PieceCache.of(path.absolute(), int(limit), sequence_length * _WIDEST_ID)
    if 4 * cache.piece > limit:
        raise ConfigError(
            f"data.cache_bytes={limit:.0f} holds fewer than 4 pieces of {show_bytes(cache.piece)},"
            f" the least for samples of {sequence_length} tokens. Use at least {4 * cache.piece}."
        )
    return cache


def check_data_urls(data: Mapping[str, Any]) -> None:
    """Check the paths of a group `data`, their URLs and the options of their cache.

    Raises:
        ConfigError: a list of paths is empty; a URL has a secret in it, is a pattern of a web
            server, or needs a package that is not installed; or the cache is too small.
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
        groups = {
            f"data.sources.{name}": source
            for name, source in data["sources"].items()
            if isinstance(source, Mapping)
        }
    for group, entries in groups.items():
        for key in ("train_path", "val_path"):
            yield from _paths_of(f"{group}.{key}", entries.get(key))


def _paths_of(key: str, value: Any) -> Iterator[tuple[str, str]]:
    paths = [path for path in path_list(value) if isinstance(path, str | PathLike) and path]
    if isinstance(value, Sequence) and len(paths) != max(1, len(path_list(value))):
        raise ConfigError(
            f"{key} must be a path, a URL, or a list with at least one of them; got {value!r}."
        )
    yield from ((key, str(path)) for path in paths)


def _check_url(key: str, url: str) -> None:
    check_secrets({key: url})
    path = data_place(url)
    if not isinstance(path, SteadyPath):
        return
    if "?" in url and path.protocol in WEB:
        raise ConfigError(
            f"{key} has a query ({url.partition('?')[0]}?...), and the files next to it would have"
            " none. Use a URL without a query."
        )
    if path.is_pattern and path.protocol in WEB:
        raise ConfigError(
            f"{key}={url} is a pattern, and web servers do not list their files. Name a folder of"
            " lightning-3d tokenize, whose manifest.json lists them, or give a list of URLs:"
            f" {key}=[{path.protocol}://.../0.bin,{path.protocol}://.../1.bin]."
        )
    try:
        path.require_backend()
    except CheckpointError as error:
        raise ConfigError(f"{key}={error}") from None
