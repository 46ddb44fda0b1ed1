"""The folder of this user for what can be made or fetched again. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_3d"
