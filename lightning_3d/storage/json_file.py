"""Read text and JSON that may come from anywhere. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

from lightning_3d.storage.remote_path import RemotePath


def read_text(path: Path | RemotePath) -> str:
    """Read a text file.

    Raises:
        OSError: it does not exist or cannot be read, or is a pipe or a device, which may never end.
        ValueError: it is not text.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "It is a pipe or a device, not a file", str(path))
    return path.read_text("utf-8")


def replace_text(path: Path, text: str) -> None:
    """Write a text file beside its place and rename it: readers never see a part of it, and a
    failure leaves the earlier file.

    A device or a pipe is written itself, and so is the file to which a link leads.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or is nested so deeply that Python cannot read it.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
