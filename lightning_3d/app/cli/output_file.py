"""Files that a command is asked to write."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightning_3d.errors import ConfigError


def output_file(option: str) -> Callable[[str], Path]:
    """Make the argparse type of an option whose value is a file to write."""

    def read(text: str) -> Path:
        if not text:
            raise ConfigError(f"{option} needs the name of a file; got an empty string.")
        path = Path(text)
        check_output(path, option)
        return path

    return read


def check_output(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work starts. Leaves nothing behind.

    Raises:
        ConfigError: the path is a folder, its folder does not exist, or the system does not allow
            writing.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; give the name of a file.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{option} {path} must be in an existing folder; there is no folder"
            f" {path.absolute().parent}."
        )
    try:
        if not path.exists():
            path.open("xb").close()
            path.unlink()
        elif not os.access(path, os.W_OK):
            raise PermissionError("Permission denied")
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {error.strerror or error}."
        ) from None
