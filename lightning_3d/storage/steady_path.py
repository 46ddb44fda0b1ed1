"""URLs whose reads are repeated after errors that pass: a server that is overloaded, a connection
that breaks. Imports no torch."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from typing_extensions import override

from lightning_3d.errors import CheckpointError, plural
from lightning_3d.storage.remote_path import RemotePath

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 16.0
"""Wait before the second attempt, which doubles with each attempt, and the longest one."""
_REQUEST_SECONDS = 60.0
"""Time that a request may take, in backends that can limit it."""
_PASSING = (408, 425, 429)
"""Responses of HTTP from 400 to 499 that may differ a moment later."""
_PERMANENT = (
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
    CheckpointError,
    NotImplementedError,
    TypeError,
)

_Result = TypeVar("_Result")


@dataclass(frozen=True, order=True)
class SteadyPath(RemotePath):
    """A URL to read from. Errors that may pass are followed by further attempts, with waits that
    grow; then the error is raised.

    Attributes:
        attempts: number of attempts at most: 9 take a minute, 5 take 8 seconds.
    """

    attempts: int = 9

    @override
    def _info(self) -> dict[str, Any]:
        return self._steadily(super()._info)

    @override
    def read_bytes(self) -> bytes:
        return self._steadily(super().read_bytes)

    @override
    def glob(self) -> dict[Self, bool]:
        return self._steadily(super().glob)

    @override
    def size(self) -> int:
        size = self._info().get("size")
        if size is None:
            raise OSError(f"{self.url}: the server does not say how large it is.")
        return int(size)

    @override
    def fetch(self, start: int, end: int) -> bytes:
        """Read the bytes [start, end).

        Raises:
            OSError: the file is shorter, or the server ignores ranges.
        """
        return self._steadily(lambda: self._fetch_exactly(start, end))

    def _fetch_exactly(self, start: int, end: int) -> bytes:
        found = super().fetch(start, end)
        if len(found) > end - start:
            raise NotImplementedError(
                f"{self.url}: the server sends whole files: it does not support requests for a"
                " range of bytes."
            )
        if len(found) < end - start:
            raise OSError(
                f"{self.url}: {plural(len(found), 'byte')} came for the {end - start} from byte"
                f" {start} on."
            )
        return found

    @override
    def _limits(self, request: Callable[..., Any]) -> dict[str, Any]:
        """Limit the time of a request that a backend runs in its event loop: its methods are
        wrappers, which take the limit."""
        return {"timeout": _REQUEST_SECONDS} if hasattr(request, "__wrapped__") else {}

    def facts(self) -> str:
        """Describe this version of the file by what the store says of it: its size and, where it
        has them, its hash and time of change."""
        info = self._info()
        return "|".join(
            f"{key}={info[key]}" for key in ("size", *_VERSIONS) if info.get(key) is not None
        )

    def _steadily(self, read: Callable[[], _Result]) -> _Result:
        wait = FIRST_WAIT_SECONDS
        for attempt in range(1, self.attempts + 1):
            try:
                return read()
            except Exception as error:
                origin = _origin(self.url, error)
                if attempt == self.attempts or not _may_pass(origin):
                    raise _named(self.url, origin, attempt) from None
            time.sleep(wait * random.uniform(0.75, 1.25))
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)
        raise AssertionError("the last attempt returns or raises")


_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "Content-MD5",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "mtime",
    "updated",
)
"""Keys under which backends have a hash of a file, its version or the time of its last change."""


def _origin(url: str, error: BaseException) -> BaseException:
    """Return the error that a backend raised.

    `RemotePath` wraps it, and fsspec reports any failure of HTTP to look at a file, a broken
    connection too, as `FileNotFoundError`.
    """
    if error.__cause__ is not None and str(error).startswith(f"{url}: "):
        error = error.__cause__
    cause = error.__cause__
    failed = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and cause is not None and failed else error


def _may_pass(origin: BaseException) -> bool:
    """Check whether another attempt may succeed."""
    status = getattr(origin, "status", None)
    if isinstance(status, int):
        return status >= 500 or status in _PASSING
    return not isinstance(origin, _PERMANENT)


def _named(url: str, origin: BaseException, attempts: int) -> OSError:
    """Return an error that names the URL; `FileNotFoundError` if there is no such file."""
    if isinstance(origin, FileNotFoundError) or getattr(origin, "status", None) in (404, 410):
        return FileNotFoundError(url)
    own = str(origin).startswith(f"{url}: ")
    text = without_secrets(
        " ".join((str(origin) if own else f"{url}: {type(origin).__name__}: {origin}").split())
    ).rstrip(".")
    return OSError(f"{text} ({attempts} attempts)" if attempts > 1 else text)


_WEB = r"\b(?:https?|wss?|ftps?)://"
_CREDENTIALS = re.compile(
    rf"(?i)({_WEB}(?=[^/\s'\"]*@)|\w+://(?=[^/\s'\"]*:[^/\s'\"]*@))[^/\s'\"]*@"
)
_QUERY = re.compile(rf"(?i)({_WEB}[^\s'\"?]*|\w+://[^\s'\"]*?(?=\?[^\s'\"/]*=))\?[^\s'\")]*")


def without_secrets(text: str) -> str:
    """Remove from the URLs in a text what may be secret: user and password, and the query, which
    signs the URLs of some stores.

    A ? begins a query in a URL of a web server. In others, it may be a sign of a pattern, unless
    NAME= follows.
    """
    return _QUERY.sub(r"\1?...", _CREDENTIALS.sub(r"\1...@", text))
