"""Places that fsspec knows (s3://, gs://, hf://, memory://, ...), with the few methods of `pathlib.Path` that checkpoints need.

Imports no torch, and a backend (s3fs, gcsfs, ...) when something is asked of it. Credentials and endpoints are those that the backend
finds by itself, and fsspec's own configuration (`FSSPEC_S3_ENDPOINT_URL`, ~/.config/fsspec). An object store has no folders and no
rename: a file is there, whole, when it was closed.
"""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.errors import CheckpointError

_LOCAL = ("file", "local")
_UPLOADED = 64 * 2**20
"""Bytes of one part of an upload: 10,000 of them, as many as S3 takes, are 640 GB."""
_FETCHED = 8 * 2**20
"""Bytes of one request where much is read; several are under way at a time, if the backend can."""
_BLOCK, _BLOCKS = 256 * 2**10, 8
"""Small reads are served from so many blocks of so many bytes."""


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL. Everything that fails is an `OSError` that names it."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether anything lies below."""
        return self._kind() == "directory"

    def exists(self) -> bool:
        return self._kind() is not None

    def is_symlink(self) -> bool:
        return False

    def _kind(self) -> str | None:
        try:
            return str(self._info()["type"])
        except FileNotFoundError:
            return None

    def _info(self) -> dict[str, Any]:
        with self._asked(fresh=True) as (system, path):
            found: dict[str, Any] = system.info(path)
            return found

    def size(self) -> int:
        return int(self._info()["size"])

    def modified(self) -> float:
        """Seconds since 1970; 0 where the store does not say."""
        try:
            with self._asked(fresh=True) as (system, path):
                return float(system.modified(path).timestamp())
        except OSError:
            return 0.0

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies in a folder; nothing where there is none."""
        try:
            with self._asked(fresh=True) as (system, path):
                names = {found.rstrip("/").rpartition("/")[2] for found in system.ls(path, detail=False) if found.rstrip("/") != path}
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in sorted(names):
            yield self / name

    def sizes(self) -> dict[str, int]:
        """Bytes of all files below, by their paths from here, as the store lists them: it may lag behind."""
        try:
            with self._asked(fresh=True) as (system, path):
                return {name[len(path) :].lstrip("/"): info["size"] for name, info in system.find(path, detail=True).items()}
        except FileNotFoundError:
            return {}

    def read_bytes(self) -> bytes:
        with self._asked(fresh=True) as (system, path):
            contents: bytes = system.cat_file(path)
            return contents

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, contents: bytes) -> None:
        """In one request, which replaces what is there or does nothing."""
        upload = Upload(self)
        try:
            upload.write(contents)
            upload.finish()
        finally:
            upload.close()

    def create(self, contents: bytes) -> None:
        """Write a file that must not be there. Where the store can do that in one step (S3, GCS), one of several succeeds.

        Raises:
            FileExistsError: it is there.
        """
        with self._asked(fresh=True) as (system, path):
            try:
                system.pipe_file(path, contents, mode="create")
            except FileNotFoundError:  # the folder, where there are folders
                system.makedirs(path.rpartition("/")[0], exist_ok=True)
                system.pipe_file(path, contents, mode="create")
            except (TypeError, NotImplementedError):  # not in one step
                if system.exists(path):
                    raise FileExistsError(path) from None
                system.pipe_file(path, contents)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._asked(fresh=True) as (system, path):
                system.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove everything below; nothing happens where there is nothing."""
        with suppress(FileNotFoundError), self._asked(fresh=True) as (system, path):
            system.rm(path, recursive=True)

    def open(self, mode: str = "rb", buffering: int = 0) -> Any:
        """For reading by ranges, or with "xb" for an upload."""
        if mode == "xb":
            return Upload(self)
        ranges = _Ranges(self)
        return io.BufferedReader(ranges, buffering) if buffering > 1 else ranges

    def fetch(self, start: int, end: int) -> bytes:
        """Bytes [start, end)."""
        with self._asked() as (system, path):
            starts = list(range(start, end, _FETCHED)) or [start]
            ends = [min(end, first + _FETCHED) for first in starts]
            if len(starts) == 1:
                return bytes(system.cat_file(path, start=start, end=end))
            return b"".join(system.cat_ranges([path] * len(starts), starts, ends, on_error="raise"))

    def require_backend(self) -> None:
        """Starts nothing: ranks can still be forked from this process.

        Raises:
            CheckpointError: fsspec does not know the protocol, or its package is not installed.
        """
        import fsspec

        if "::" in self.url.partition("://")[0]:
            raise CheckpointError(f"{self.url} is a chain of file systems, which may show what was there before. Write the last one alone.")
        try:
            fsspec.get_filesystem_class(self.protocol)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{self.url}: {_missing(self.protocol, error)}") from error

    def system(self) -> tuple[Any, str]:
        """The backend, and what this place is called there. Raises as `require_backend`."""
        import fsspec

        self.require_backend()
        return fsspec.url_to_fs(self.url)

    @contextmanager
    def _asked(self, *, fresh: bool = False) -> Iterator[tuple[Any, str]]:
        """The backend, whose errors of any class become `OSError`.

        Args:
            fresh: it must not answer from what it has seen before.
        """
        with as_os_error(self.url):
            system, path = self.system()
            if fresh:
                system.invalidate_cache()
            yield system, path.rstrip("/")


@contextmanager
def as_os_error(url: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError, NotADirectoryError, CheckpointError):
        raise
    except Exception as error:  # botocore, aiohttp and others have classes of their own
        raise OSError(f"{url}: {type(error).__name__}: {' '.join(str(error).split())}") from error


Place = Path | RemotePath


def place(path: str | os.PathLike[str]) -> Place:
    """A path, absolute, or a URL."""
    text = os.fspath(path)
    protocol, _, rest = text.partition("://")
    if not rest:
        return Path(text).absolute()
    return Path(rest).absolute() if protocol in _LOCAL else RemotePath(text.rstrip("/"))


def _missing(protocol: str, error: Exception) -> str:
    """How to get the backend of a protocol."""
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol)
    if known is None:
        return f'fsspec knows no "{protocol}://".' if isinstance(error, ValueError) else f"{error}"
    package = known["class"].partition(".")[0]
    if package == "fsspec":
        return f"{known.get('err', error)}."
    return f"{package} is not installed. Install it: pip install {package}"


class Upload:
    """A new file that is there after `finish`."""

    def __init__(self, path: RemotePath) -> None:
        self.name = path.url
        system, inside = path.system()
        with as_os_error(self.name):
            try:
                self._file = system.open(inside, "wb", block_size=_UPLOADED)
            except FileNotFoundError:  # no folder, where there are folders. Object stores say so later, of a bucket: that is not made
                system.makedirs(inside.rpartition("/")[0], exist_ok=True)
                self._file = system.open(inside, "wb", block_size=_UPLOADED)
        self._open = True

    def write(self, data: bytes | memoryview) -> int:
        with as_os_error(self.name):
            self._file.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """`finish` does."""

    def finish(self) -> None:
        with as_os_error(self.name):
            self._file.close()
        self._open = False

    def close(self) -> None:
        """Give up what is not finished."""
        if self._open:
            self._open = False
            discard: Callable[[], None] | None = getattr(self._file, "discard", None)
            with suppress(Exception):  # it failed before, and that is told
                self._file.closed = True  # or it is uploaded when it is collected
                if discard is not None:
                    discard()


class _Ranges(io.RawIOBase):
    """A file of which only what is asked for is fetched: small reads by blocks, large ones as they are."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._at = path, 0
        self._size: int | None = None
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = 0 if whence == io.SEEK_SET else self._at if whence == io.SEEK_CUR else self._end()
        self._at = max(0, base + offset)
        return self._at

    def _end(self) -> int:
        if self._size is None:
            self._size = self._path.size()
        return self._size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._end() - self._at)]
        if len(view) > _BLOCK:
            view[:] = self._path.fetch(self._at, self._at + len(view))
            self._at += len(view)
            return len(view)
        done = 0
        while done < len(view):
            number, offset = divmod(self._at, _BLOCK)
            part = self._block(number)[offset : offset + len(view) - done]
            if not part:
                break
            view[done : done + len(part)] = part
            done += len(part)
            self._at += len(part)
        return done

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            self._blocks[number] = self._path.fetch(number * _BLOCK, min((number + 1) * _BLOCK, self._end()))
        self._blocks.move_to_end(number)
        while len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return self._blocks[number]
