"""A cache of remote data that cannot be locked or written: one message, before and during a run."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.errors import DataError, UnreachableData
from lightning_3d.storage.piece_cache import CachedFile, PieceCache, fetch_together
from lightning_3d.storage.steady_path import SteadyPath

PIECE = 2**16
CONTENTS = np.random.default_rng(0).bytes(8 * PIECE)
URL = "memory://unusable-cache/file"


def a_file(folder: Path) -> CachedFile:
    fsspec.filesystem("memory").pipe("/unusable-cache/file", CONTENTS)
    cache = PieceCache(folder, 2**20, PIECE)
    cache.prepare()
    return CachedFile(SteadyPath(URL, attempts=1), "0" * 32, len(CONTENTS), cache)


def refuse_to_create(folder: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file be opened for writing below a folder, and no time be set, as on a full or a
    read-only disk."""
    real: dict[str, Callable[..., Any]] = {"open": os.open, "utime": os.utime}

    def fails(name: str) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            writes = (
                name == "utime"
                and code == errno.EROFS
                or name == "open"
                and arguments[0] & (os.O_CREAT | os.O_RDWR)
            )
            if writes and str(path).startswith(str(folder)):
                raise OSError(code, os.strerror(code), str(path))
            return real[name](path, *arguments, **options)

        return call

    for name in real:
        monkeypatch.setattr(os, name, fails(name))


WORDS = {
    "removed": (
        "cannot be written: No such file or directory. Do not remove it while a run uses it."
    ),
    "full": (
        "cannot be written: No space left on device. Set a smaller data.cache_bytes, or"
        " data.cache_dir to a folder on another disk."
    ),
    "read-only": (
        "cannot be written: Read-only file system. Set data.cache_dir to a folder on another disk."
    ),
    "no locks": "has no file locks. Set data.cache_dir to a folder on a local disk.",
}


def spoil(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case == "removed":
        shutil.rmtree(folder)
    elif case == "no locks":
        monkeypatch.setattr(
            "fcntl.flock",
            lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))),
        )
    else:
        refuse_to_create(folder, errno.ENOSPC if case == "full" else errno.EROFS, monkeypatch)


@pytest.mark.parametrize("case", WORDS)
def test_a_reader_ends_with_one_message(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = a_file(tmp_path / "cache")
    assert file.piece(1) == CONTENTS[PIECE : 2 * PIECE]
    spoil(tmp_path / "cache", case, monkeypatch)
    path = tmp_path / "cache" / "pieces" / "00" / "x"
    reads: list[Callable[[], Any]] = [
        lambda: file.piece(0),
        lambda: file.fetch(0),
        lambda: fetch_together([(file, 2), (file, 3)]),
    ]
    for read in (*reads, lambda: file.cache.store(path, bytes(10))):
        with pytest.raises(UnreachableData) as caught:
            read()
        assert str(caught.value) == f"The cache of remote data, {tmp_path}/cache, {WORDS[case]}"
    if case != "removed":  # what is in the cache can be read without a lock
        assert file.piece(1) == CONTENTS[PIECE : 2 * PIECE]
        file.fetch(1)


@pytest.mark.parametrize("case", ["full", "read-only", "no locks"])
def test_a_cache_is_refused_before_ranks_are_started(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = a_file(tmp_path / "cache")
    spoil(tmp_path / "cache", case, monkeypatch)
    config = {
        "name": "tokens",
        "train_path": URL,
        "sequence_length": 64,
        "cache_dir": str(tmp_path / "cache"),
    }
    for refused in (file.cache.prepare, file.cache.room, lambda: check_files(config)):
        with pytest.raises(DataError) as caught:
            refused()
        assert (
            str(caught.value) == f"The cache of remote data, {tmp_path}/cache, {WORDS[case]}"
            and caught.value.exit_code == 2
        )
