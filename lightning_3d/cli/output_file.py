"""Files that a command is told to write."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_3d.errors import ConfigError


def check_output(path: Path, option: str) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold. Leaves nothing behind.

    Raises:
        ConfigError: it is a folder, lies in none, or the system does not let it be written.
    """
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; it takes the name of a file.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.absolute().parent}.")
    try:
        if not path.exists():
            path.open("xb").close()
            path.unlink()
        elif not os.access(path, os.W_OK):
            raise PermissionError("Permission denied")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror or error}.") from None
