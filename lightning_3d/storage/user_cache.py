"""The folder of this user for what can be made or fetched again. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "lightning_3d"


def home() -> Path:
    """Return the home folder. A user id without one, as in some containers, gets one below the
    folder for temporary files.

    That becomes HOME, because libraries ask for a home folder too.
    """
    try:
        return Path.home()
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"home-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ["HOME"] = str(folder)
        return folder
