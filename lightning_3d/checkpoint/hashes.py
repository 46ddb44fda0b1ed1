"""SHA-256 of the files of a checkpoint: taken while they are written, compared before anything in
them is read.

`sha256sum` gives the same numbers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lightning_3d.errors import StorageError, reason
from lightning_3d.ranks.progress import task
from lightning_3d.storage.remote_path import Place, RemotePath, Upload

_READ_BYTES = 32 * 2**20
"""Bytes of a remote file that are read at a time."""
_THREADS = 4
"""Files that a process hashes at the same time; hashing releases the interpreter's lock."""


@dataclass(frozen=True)
class FileSum:
    """Size and hash of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Place) -> FileSum:
        with (
            path.open("rb", buffering=_READ_BYTES)
            if isinstance(path, RemotePath)
            else path.open("rb")
        ) as file:
            digest = hashlib.file_digest(file, "sha256")
            return cls(file.tell(), digest.hexdigest())


class HashedFile:
    """A new file that is hashed while it is written. Every method that writes raises `StorageError`
    if the storage fails.

    Attributes:
        position: bytes written so far.
    """

    def __init__(self, path: Place) -> None:
        self._path = path
        self._file: BinaryIO | Upload = path.open("xb")
        self._hash = hashlib.sha256()
        self.position = 0

    def write(self, data: bytes | memoryview) -> None:
        with self._storage_errors():
            self._file.write(data)
        self._hash.update(data)
        self.position += memoryview(data).nbytes

    def close(self) -> FileSum:
        """Finish the file. Returns its size and hash once the contents are on disk."""
        try:
            with self._storage_errors():
                _finish(self._file)
        finally:
            self.abandon()
        return FileSum(self.position, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file without finishing it."""
        with suppress(OSError):
            self._file.close()

    @contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"{self._path} could not be written: {reason(error)}") from error


def _finish(file: BinaryIO | Upload) -> None:
    if isinstance(file, Upload):
        file.finish()
    else:
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk: a rename must not reach the disk
    before what it commits."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def split_evenly(files: Mapping[str, FileSum], parts: int) -> list[list[str]]:
    """Split the names of files into parts of about the same number of bytes."""
    split: list[list[str]] = [[] for _ in range(parts)]
    load = [0] * parts
    for name in sorted(files, key=lambda name: (-files[name].bytes, name)):
        least = load.index(min(load))
        split[least].append(name)
        load[least] += files[name].bytes
    return split


def find_damage(folder: Place, files: Mapping[str, FileSum], names: Iterable[str]) -> list[str]:
    """Read files of a folder and list those that differ from their hashes, each with what is
    wrong."""

    def compare(name: str) -> str | None:
        try:
            found = FileSum.of(folder / name)
        except FileNotFoundError:
            return f"the file {name} is missing"
        except OSError as error:
            return f"the file {name} cannot be read ({error.strerror or error})"
        if found.bytes != files[name].bytes:
            return f"the file {name} has {found.bytes} bytes instead of {files[name].bytes}"
        if found.sha256 != files[name].sha256:
            hashes = f"its SHA-256 is {found.sha256[:12]}..., not {files[name].sha256[:12]}..."
            return f"the file {name} has changed since it was saved ({hashes})"
        return None

    names = list(names)
    problems = []
    total = sum(files[name].bytes for name in names)
    with (
        task("comparing files with their hashes", total, "B") as advance,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        for name, problem in zip(names, pool.map(compare, names), strict=True):
            advance(files[name].bytes)
            problems += [problem] if problem is not None else []
    return problems
