"""The place in the user's own code at which an exception was raised."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

_LIBRARIES = frozenset(
    {
        "lightning_3d",
        "torch",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "transformers",
        "deepspeed",
        "peft",
    }
)


class Line(NamedTuple):
    """A line that was running."""

    file: str
    number: int
    function: str
    frame: FrameType

    @property
    def code(self) -> str:
        """The text of the line; empty where its file cannot be read."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


def own_line(error: BaseException) -> Line | None:
    """Find the innermost line of the user's own code, or of a package that he uses; None where only
    libraries ran."""
    lines = [line for line in lines_of(error) if not _is_library(line)]
    here = [line for line in lines if "-packages" not in line.file]
    return next(reversed(here or lines), None)


def lines_of(error: BaseException) -> Iterator[Line]:
    """Yield the lines that an exception went through, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        yield Line(
            code.co_filename,
            trace.tb_lineno,
            getattr(code, "co_qualname", code.co_name),
            trace.tb_frame,
        )
        trace = trace.tb_next


def _is_library(line: Line) -> bool:
    root = line.frame.f_globals.get("__name__", "").partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names
