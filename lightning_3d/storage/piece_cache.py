"""Pieces of remote files on the disk of a node, which its processes share: bounded, fetched once,
least recently used ones first out.

The folder of a cache:

    pieces/3f/NAME    a piece, followed by its CRC-32 (4 bytes)
    used              bytes of all pieces, and the boot of the machine in which they were counted
    partial           the piece that is being written
    locks/            `used.lock` guards all changes in the folder; the others are held while a piece is fetched

A piece is written under another name and renamed, so a process that is killed leaves no half piece.
Readers read a piece as a whole, and a piece that is removed meanwhile stays readable for them.
Imports no torch.
"""  # noqa: E501

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import DataError, UnreachableData, is_full
from lightning_3d.storage.steady_path import SteadyPath

SMALLEST_PIECE = 64 * 2**10
"""Bytes of a piece at least. On a store that answers in 30 ms, smaller requests take as long."""
_MOST_PIECES = 2**18
"""Pieces in a cache at most, so that looking for the oldest ones takes about a second."""
_CHECKSUM = 4
_STRIPES = 1024
"""Number of locks of pieces. Two pieces that share a lock are fetched one after the other."""
_KEPT = 0.9
"""Share of the limit to which a full cache shrinks, so that the oldest pieces are not looked for
with each new one."""
THREADS = 8
"""Pieces that a process fetches at the same time."""


@dataclass(frozen=True)
class PieceCache:
    """A cache of pieces.

    Attributes:
        folder: its folder.
        limit: bytes of its files at most.
        piece: bytes of a piece.
    """

    folder: Path
    limit: int
    piece: int

    @classmethod
    def of(cls, folder: Path, limit: int, row: int) -> PieceCache:
        """Choose the size of pieces: the smallest power of two that holds a row and lets the cache
        have a manageable number of pieces.

        Args:
            row: bytes that are read at a time.
        """
        return cls(
            folder,
            limit,
            1 << (max(SMALLEST_PIECE, row, -(-limit // _MOST_PIECES)) - 1).bit_length(),
        )

    def prepare(self) -> None:
        """Create the folder and check that it can be used.

        Raises:
            DataError: it cannot be written, or has no locks.
        """
        with self.usable(DataError):
            for name in ("locks", "pieces"):
                (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.locked("used.lock", DataError):
            pass

    @contextmanager
    def usable(self, kind: type[DataError] = UnreachableData) -> Iterator[None]:
        """Report an error of the disk in one message that names the folder.

        Args:
            kind: `UnreachableData` while a run reads; `DataError` before it starts, when the user
                can still choose another folder.

        Raises:
            DataError: of this kind.
        """
        try:
            yield
        except OSError as error:
            raise kind(f"The cache of remote data, {self.folder}, {_explain(error)}") from None

    @contextmanager
    def locked(self, name: str, kind: type[DataError] = UnreachableData) -> Iterator[None]:
        """Hold a lock of this cache, and wait for it if need be. The kernel frees it if the process
        ends. Raises as `usable`."""
        with self.usable(kind):
            descriptor = os.open(
                self.folder / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        try:
            with self.usable(kind):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # a process that was forked meanwhile has the descriptor too, and must not keep it
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def load(self, path: Path, size: int) -> bytes | None:
        """Read a piece, which becomes the most recently used one. None: it is not there, or is
        damaged."""
        try:
            contents = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):  # it was removed meanwhile
            os.utime(path)
        data = memoryview(contents)[:-_CHECKSUM]
        if len(data) != size or zlib.crc32(data) != int.from_bytes(contents[-_CHECKSUM:], "little"):
            return None  # a power failure can leave such a piece
        return bytes(data)

    def store(self, path: Path, data: bytes) -> None:
        """Add a piece, and remove the oldest ones first where there is no room.

        Raises:
            UnreachableData: the disk is full, or cannot be written.
        """
        contents = data + zlib.crc32(data).to_bytes(_CHECKSUM, "little")
        if len(contents) > self.limit:
            return
        partial = self.folder / "partial"
        with self.locked("used.lock"), self.usable():
            try:
                used = self._used()
                if used + len(contents) > self.limit:
                    used = self._shrink(len(contents))
                # before the piece: after a kill in between, the number is too large, never too
                # small
                self._note(used + len(contents))
                partial.write_bytes(contents)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                partial.replace(path)
            except OSError:
                with suppress(OSError):
                    partial.unlink()
                raise

    def room(self) -> int:
        """Return the bytes that the cache has and those that are free on its disk. Raises
        `DataError` as `usable`."""
        with self.locked("used.lock", DataError), self.usable(DataError):
            return shutil.disk_usage(self.folder).free + self._used()

    def _used(self) -> int:
        """Read the bytes of all pieces; count them after a boot, before which the machine may have
        lost what was written last."""
        try:
            number, boot = (self.folder / "used").read_text().split()
            if boot == _boot():
                return int(number)
        except (OSError, ValueError):
            pass
        return sum(size for _, size, _ in self._pieces())

    def _note(self, used: int) -> None:
        (self.folder / "used").write_text(f"{used} {_boot()}")

    def _pieces(self) -> Iterator[tuple[int, int, str]]:
        """Yield (time of the last use, bytes, path) of each piece."""
        for folder in os.scandir(self.folder / "pieces"):
            for entry in os.scandir(folder.path):
                found = entry.stat()
                yield found.st_mtime_ns, found.st_size, entry.path

    def _shrink(self, room: int) -> int:
        """Remove the pieces that were not used for the longest time, and return the bytes that are
        left."""
        pieces = sorted(self._pieces())
        used = sum(size for _, size, _ in pieces)
        target = min(int(self.limit * _KEPT), self.limit - room)
        for _, size, path in pieces:
            if used <= target:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used


@dataclass(frozen=True)
class CachedFile:
    """A remote file whose pieces are read through a cache.

    Attributes:
        url: where it is.
        version: identity of its contents: 32 hexadecimal digits.
        size: its bytes.
        cache: the cache.
    """

    url: SteadyPath
    version: str
    size: int
    cache: PieceCache

    def __str__(self) -> str:
        return str(self.url)

    def pieces(self, start: int, end: int) -> range:
        """Return the numbers of the pieces that the bytes [start, end) are in."""
        return range(start // self.cache.piece, -(-end // self.cache.piece))

    def read(self, start: int, end: int) -> bytes:
        """Read the bytes [start, end). Raises as `piece`."""
        numbers = self.pieces(start, end)
        first = numbers.start * self.cache.piece
        return b"".join(self.piece(number) for number in numbers)[start - first : end - first]

    def piece(self, number: int) -> bytes:
        """Return a piece. One process of the node fetches it if it is not in the cache; others
        wait.

        Raises:
            UnreachableData: it cannot be fetched, or the cache cannot be written.
        """
        path, (start, end) = self._path(number), self._span(number)
        found = self.cache.load(path, end - start)
        if found is not None:
            return found
        with self.cache.locked(f"{zlib.crc32(path.name.encode()) % _STRIPES:03x}.lock"):
            found = self.cache.load(path, end - start)
            if found is None:
                try:
                    found = self.url.fetch(start, end)
                except OSError as error:
                    reader = (
                        f"Rank {os.environ['RANK']}" if "RANK" in os.environ else "This process"
                    )
                    raise UnreachableData(
                        f"{reader} cannot read training data: {unreachable(error)}."
                    ) from None
                self.cache.store(path, found)
        return found

    def fetch(self, number: int) -> None:
        """Fetch a piece if it is not in the cache. Raises as `piece`."""
        try:
            os.utime(self._path(number))
        except OSError:  # it is not there, or the cache can only be read
            self.piece(number)

    def is_cached(self, number: int) -> bool:
        return os.path.exists(self._path(number))

    def _path(self, number: int) -> Path:
        name = f"{self.version}-{self.cache.piece}-{number}"
        return self.cache.folder / "pieces" / f"{zlib.crc32(name.encode()) % 256:02x}" / name

    def _span(self, number: int) -> tuple[int, int]:
        return number * self.cache.piece, min((number + 1) * self.cache.piece, self.size)


Piece = tuple[CachedFile, int]
"""A piece of a remote file, by its number."""


def fetch_together(pieces: Sequence[Piece]) -> None:
    """Fetch the pieces that are not in the cache, several at the same time. Raises as
    `CachedFile.piece`."""
    missing = [
        (file, number) for file, number in dict.fromkeys(pieces) if not file.is_cached(number)
    ]
    failed = threading.Event()

    def fetch(piece: Piece) -> None:
        if failed.is_set():
            return  # otherwise each piece would be tried for a minute
        try:
            piece[0].fetch(piece[1])
        except BaseException:
            failed.set()
            raise

    if len(missing) > 1:
        with ThreadPoolExecutor(min(THREADS, len(missing))) as pool:
            list(pool.map(fetch, missing))


def unreachable(error: OSError) -> str:
    """Describe why a URL cannot be read, as the end of a sentence; it names the URL."""
    return f"there is no {error}" if isinstance(error, FileNotFoundError) else str(error)


def _explain(error: OSError) -> str:
    """Say why the folder of a cache cannot be used, and what works, as the end of a message."""
    if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
        return "has no file locks. Set data.cache_dir to a folder on a local disk."
    if is_full(error):
        remedy = "Set a smaller data.cache_bytes, or data.cache_dir to a folder on another disk."
    elif isinstance(error, FileNotFoundError):
        remedy = "Do not remove it while a run uses it."
    else:
        remedy = "Set data.cache_dir to a folder on another disk."
    return f"cannot be written: {error.strerror}. {remedy}"


def _boot() -> str:
    """Identify this boot of the machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "?"
