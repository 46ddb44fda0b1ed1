"""What a run writes besides checkpoints is not worth the run. Imports nothing heavy."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import TracebackType


class Surviving:
    """Context that turns the first error of the storage into a warning, and ignores further ones.

    Args:
        path: the file that is written.
        part: what is missing after an error.
    """

    def __init__(self, path: Path, part: str = "a part of it") -> None:
        self._path = path
        self._part = part
        self._warned = False

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, OSError):
            return False
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"Cannot write to {self._path}; training continues and {self._part} will be"
                f" missing: {error}",
                stacklevel=3,
            )
        return True
