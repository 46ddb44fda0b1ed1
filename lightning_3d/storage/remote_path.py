"""URLs that fsspec supports (s3://, gs://, hf://, memory://, ...), with the few methods of
`pathlib.Path` that checkpoints need.

Imports no torch, and imports a backend (s3fs, gcsfs, ...) at its first use. Credentials and
endpoints come from the backend's own defaults and from fsspec's configuration
(`FSSPEC_S3_ENDPOINT_URL`, ~/.config/fsspec). An object store has no folders and no rename: a file
appears as a whole when it is closed.
"""

from __future__ import annotations

import io
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, Self, TypeVar

from lightning_3d.errors import CheckpointError
from lightning_3d.storage.fork_gate import FORKS
from lightning_3d.storage.url_pattern import SIGNS, matches

_LOCAL = ("file", "local")
WEB = ("http", "https")
"""Protocols of web servers, which have no listings."""
_UPLOADED = 64 * 2**20
"""Bytes of one part of an upload. S3 accepts 10,000 parts, which makes 671 GB."""
_FETCHED = 8 * 2**20
"""Bytes of one request in large reads. Several are in flight at a time if the backend supports
that."""
_BLOCK, _BLOCKS = 256 * 2**10, 8
"""Bytes and number of cached blocks from which small reads are served."""
_BACKENDS: set[Any] = set()
"""Backends in use. They are kept, because fsspec frees those of the parent in a forked process (a
worker of a loader), and so closes connections that the parent uses: the next read of the parent
would wait until its time is over."""
_LOGGERS = tuple(
    map(
        logging.getLogger,
        ("fsspec", "s3fs", "aiobotocore", "botocore", "gcsfs", "adlfs", "azure", "httpx", "httpx2"),
    )
)
"""Loggers of backends and their clients. At INFO, which Hydra sets for all, botocore reports where
it found credentials, and httpx2 (of hf://) and azure report every request."""


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL. Every failure is an `OSError` that names it."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> Self:
        return replace(self, url=f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Self:
        return replace(self, url=self.url.rpartition("/")[0])

    def with_name(self, name: str) -> Self:
        return self.parent / name

    def with_suffix(self, suffix: str) -> Self:
        return self.with_name(self.stem + suffix)

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Check whether there is anything below."""
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
            found: dict[str, Any] = system.info(path, **self._limits(system.info))
            return found

    def size(self) -> int:
        return int(self._info()["size"])

    def modified(self) -> float:
        """Time of the last change in seconds since the epoch; 0 where the store does not know
        it."""
        try:
            with self._asked(fresh=True) as (system, path):
                return float(system.modified(path).timestamp())
        except OSError:
            return 0.0

    def iterdir(self) -> Iterator[Self]:
        """Yield the entries of a folder; none where it does not exist."""
        try:
            with self._asked(fresh=True) as (system, path):
                names = {
                    found.rstrip("/").rpartition("/")[2]
                    for found in system.ls(path, detail=False)
                    if found.rstrip("/") != path
                }
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in sorted(names):
            yield self / name

    @property
    def is_pattern(self) -> bool:
        """Check whether the URL has one of the signs *, ? and [, the host of a web server aside."""
        inside = self.url.partition("://")[2]
        return (
            SIGNS.search(inside.partition("/")[2] if self.protocol in WEB else inside) is not None
        )

    def glob(self) -> dict[Self, bool]:
        """List what matches this URL, which must be a pattern, in the order in which `pathlib`
        sorts paths; True for folders.

        As in `glob.glob`, `**` stands for any folders, and `*` matches no dot at the beginning of a
        name. A folder that cannot be listed is an error.
        """
        url = "/".join(
            part if part == "**" else re.sub(r"\*+", "*", part) for part in self.url.split("/")
        )
        with self._asked(fresh=True) as (system, _):
            pattern = str(system._strip_protocol(url)).rstrip("/")
            entries = matches(system, pattern)
        protocol, inside = f"{self.protocol}://", url.partition("://")[2]
        # of the URL, and of the same place in the backend
        start, fixed = protocol + inside[: _first_sign(inside)], _first_sign(pattern)
        names = sorted(entries, key=lambda name: name.split("/"))
        return {replace(self, url=start + name[fixed:]): entries[name] for name in names}

    def sizes(self) -> dict[str, int]:
        """Return the bytes of all files below, by relative path, as the store lists them; listings
        may lag behind."""
        try:
            with self._asked(fresh=True) as (system, path):
                return {
                    name[len(path) :].lstrip("/"): info["size"]
                    for name, info in system.find(path, detail=True).items()
                }
        except FileNotFoundError:
            return {}

    def read_bytes(self) -> bytes:
        with self._asked(fresh=True) as (system, path):
            contents: bytes = system.cat_file(path, **self._limits(system.cat_file))
            return contents

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, contents: bytes) -> None:
        """Write the file in one request, which replaces it or changes nothing."""
        upload = Upload(self)
        try:
            upload.write(contents)
            upload.finish()
        finally:
            upload.close()

    def create(self, contents: bytes) -> None:
        """Create a file that must not exist. Where the store can do that in one step (S3, GCS), one
        of several processes succeeds.

        Raises:
            FileExistsError: it exists.
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
        """Remove everything below, if there is anything."""
        with suppress(FileNotFoundError), self._asked(fresh=True) as (system, path):
            system.rm(path, recursive=True)

    def open(self, mode: str = "rb", buffering: int = 0) -> Any:
        """Open the file for reading by ranges, or with "xb" for an upload."""
        if mode == "xb":
            return Upload(self)
        ranges = _Ranges(self)
        return io.BufferedReader(ranges, buffering) if buffering > 1 else ranges

    def fetch(self, start: int, end: int) -> bytes:
        """Read the bytes [start, end)."""
        with self._asked() as (system, path):
            starts = list(range(start, end, _FETCHED)) or [start]
            ends = [min(end, first + _FETCHED) for first in starts]
            if len(starts) == 1:
                return bytes(
                    system.cat_file(path, start=start, end=end, **self._limits(system.cat_file))
                )
            return b"".join(
                system.cat_ranges(
                    [path] * len(starts),
                    starts,
                    ends,
                    on_error="raise",
                    **self._limits(system.cat_ranges),
                )
            )

    def _limits(self, request: Callable[..., Any]) -> dict[str, Any]:
        """Return further arguments of a request that reads; none by default."""
        return {}

    def require_backend(self) -> None:
        """Check that the backend is installed. Starts no threads, so that ranks can still be forked
        from this process.

        Raises:
            CheckpointError: fsspec does not know the protocol, or its package is not installed.
        """
        import fsspec

        if "::" in self.url.partition("://")[0]:
            raise CheckpointError(
                f"{self.url} is a chain of file systems (::), which may show outdated files. Use"
                " only the last URL of the chain."
            )
        try:
            fsspec.get_filesystem_class(self.protocol)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{self.url}: {_missing(self.protocol, error)}") from error

    def system(self) -> tuple[Any, str]:
        """Return the backend, and the path of this place in it. Raises as `require_backend`."""
        import fsspec

        self.require_backend()
        _hush_backends()
        system, path = fsspec.url_to_fs(self.url)
        _BACKENDS.add(system)
        return system, path

    @contextmanager
    def _asked(self, *, fresh: bool = False) -> Iterator[tuple[Any, str]]:
        """Use the backend; its errors of any class become `OSError`.

        Args:
            fresh: whether to bypass its cache of listings.
        """
        with backend_call(self.url):
            system, path = self.system()
            if fresh:
                system.invalidate_cache()
            yield system, path.rstrip("/")


@contextmanager
def backend_call(url: str) -> Iterator[None]:
    """Call a backend: no other thread forks meanwhile, and errors become `OSError`s that name the
    URL."""
    with FORKS.closed():
        try:
            yield
        except (FileNotFoundError, FileExistsError, NotADirectoryError, CheckpointError):
            raise
        except Exception as error:  # botocore, aiohttp and others raise their own classes
            raise OSError(
                f"{url}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error


def _hush_backends() -> None:
    """Raise the loggers of backends from INFO to WARNING. A level that the user chose for one of
    them, or DEBUG for all, is kept.

    Every request does this, because the first ones come before Hydra configures its logging.
    """
    for logger in _LOGGERS:
        if logger.level == logging.NOTSET and logger.getEffectiveLevel() == logging.INFO:
            logger.setLevel(logging.WARNING)


def _first_sign(pattern: str) -> int:
    """Return the place of the first sign of a pattern."""
    found = SIGNS.search(pattern)
    return len(pattern) if found is None else found.start()


Place = Path | RemotePath


class _Suffixed(Protocol):
    @property
    def suffix(self) -> str: ...

    def with_suffix(self, suffix: str, /) -> Self: ...


AnyPlace = TypeVar("AnyPlace", bound=_Suffixed)
"""A `Place`, where the result is of the same kind."""


def size_of(path: Place) -> int:
    """Return the bytes of a file."""
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


def place(path: str | os.PathLike[str]) -> Place:
    """Return an absolute path, or a URL as `RemotePath`."""
    text = os.fspath(path)
    protocol, _, rest = text.partition("://")
    if not rest:
        return Path(text).absolute()
    return Path(rest).absolute() if protocol in _LOCAL else RemotePath(text.rstrip("/"))


def _missing(protocol: str, error: Exception) -> str:
    """Explain how to get the backend of a protocol."""
    from fsspec.registry import known_implementations

    known = known_implementations.get(protocol)
    if known is None:
        return (
            f'fsspec does not support "{protocol}://".'
            if isinstance(error, ValueError)
            else f"{error}"
        )
    package = known["class"].partition(".")[0]
    if package == "fsspec":
        return f"{known.get('err', error)}."
    return f"{package} is not installed. Install it with pip install {package}"


class Upload:
    """A new file, which exists after `finish`."""

    def __init__(self, path: RemotePath) -> None:
        self.name = path.url
        with backend_call(self.name):
            system, inside = path.system()
            try:
                self._file = system.open(inside, "wb", block_size=_UPLOADED)
            except FileNotFoundError:
                # a missing folder. Object stores report a missing bucket later; none is created
                system.makedirs(inside.rpartition("/")[0], exist_ok=True)
                self._file = system.open(inside, "wb", block_size=_UPLOADED)
        self._open = True

    def write(self, data: bytes | memoryview) -> int:
        with backend_call(self.name):
            self._file.write(data)
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Do nothing: `finish` flushes."""

    def finish(self) -> None:
        """Complete the upload: the file exists from now on."""
        with backend_call(self.name):
            self._file.close()
        self._open = False

    def close(self) -> None:
        """Discard the upload if it is not finished."""
        if self._open:
            self._open = False
            discard: Callable[[], None] | None = getattr(self._file, "discard", None)
            # it failed before, and that was reported
            with suppress(Exception), backend_call(self.name):
                self._file.closed = True  # otherwise the garbage collector would upload it
                if discard is not None:
                    discard()


class _Ranges(io.RawIOBase):
    """A file that fetches only the ranges that are read: small reads by cached blocks, large ones
    directly."""

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
            self._blocks[number] = self._path.fetch(
                number * _BLOCK, min((number + 1) * _BLOCK, self._end())
            )
        self._blocks.move_to_end(number)
        while len(self._blocks) > _BLOCKS:
            self._blocks.popitem(last=False)
        return self._blocks[number]
