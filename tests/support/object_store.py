"""An object store for tests, as a backend of fsspec: objects appear whole when they are closed,
there is no rename and there are no folders. They lie in a folder of the local disk, so that several
processes see them: `bucket:///tmp/x/a.ckpt`.

As S3 did until 2020, and others do, a listing may lag behind; an upload may fail in the middle.
"""

import os
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class BrokenConnection(Exception):
    """Backends have classes of their own, which are no `OSError`."""


class Bucket(AbstractFileSystem):
    """Attributes:
    fails: part of the names of objects of which at most `fails_after` bytes can be uploaded.
    lag: seconds until an object is listed.
    requests: what was asked for: (what, name, bytes).
    """

    protocol = "bucket"
    root_marker = "/"
    fails: ClassVar[str | None] = None
    fails_after: ClassVar[int] = 0
    lag: ClassVar[float] = 0.0
    requests: ClassVar[list[tuple[str, str, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("bucket://").strip("/")

    @classmethod
    def heal(cls) -> None:
        cls.fails, cls.fails_after, cls.lag = None, 0, 0.0
        cls.requests.clear()

    def _objects(self, below: str) -> list[Path]:
        return [
            Path(top) / name
            for top, _, names in os.walk(below)
            for name in names
            if not name.endswith(".part")
        ]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        self.requests.append(("head", path, 0))
        if os.path.isfile(path):
            return {"name": path, "type": "file", "size": os.path.getsize(path)}
        if self._objects(path):
            return {"name": path, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        self.requests.append(("list", path, 0))
        found: dict[str, dict[str, Any]] = {}
        for item in self._objects(path):
            if time.time() - item.stat().st_mtime < self.lag:
                continue
            inside = item.relative_to(path).parts
            name = f"{path}/{inside[0]}"
            is_file = len(inside) == 1
            found[name] = {
                "name": name,
                "type": "file" if is_file else "directory",
                "size": item.stat().st_size if is_file else 0,
            }
        if not found and not os.path.isfile(path):
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def modified(self, path: str) -> Any:
        from datetime import UTC, datetime

        return datetime.fromtimestamp(os.path.getmtime(self._strip_protocol(path)), UTC)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        path = self._strip_protocol(path)
        with open(path, "rb") as file:
            file.seek(start or 0)
            contents = file.read() if end is None else file.read(end - (start or 0))
        self.requests.append(("get", path, len(contents)))
        return contents

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        part = self._upload(path, value)
        try:
            if mode == "create":
                os.link(part, path)  # fails where there is one
            else:
                os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def _upload(self, path: str, value: bytes) -> Path:
        self.requests.append(("put", path, len(value)))
        if self.fails is not None and self.fails in path and len(value) > self.fails_after:
            raise BrokenConnection("the other side went away")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        part = Path(f"{path}.{uuid.uuid4().hex}.part")
        part.write_bytes(value)
        return part

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> Any:
        assert mode == "wb", "reading is by ranges"
        return _Upload(self, self._strip_protocol(path), mode, block_size=4096)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        os.unlink(path)
        for folder in Path(path).parents:  # those of objects that are gone
            try:
                folder.rmdir()
            except OSError:
                return

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        found = self._objects(self._strip_protocol(path))
        if not found:
            raise FileNotFoundError(path)
        for item in found:
            self.rm_file(str(item))

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """There are none."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are none."""


class _Upload(AbstractBufferedFile):
    """In parts; the object is there when the last one is."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        sent = sum(map(len, self.parts))
        if Bucket.fails is not None and Bucket.fails in self.path and sent > Bucket.fails_after:
            raise BrokenConnection("the other side went away")
        if final and self.autocommit:
            self.fs.pipe_file(self.path, b"".join(self.parts))
        return True


def register() -> None:
    """In each process that uses it."""
    fsspec.register_implementation("bucket", Bucket, clobber=True)
