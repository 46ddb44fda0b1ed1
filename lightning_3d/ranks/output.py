"""Standard output and error that survive a full disk, a closed pipe and a lost terminal: output is
not worth a run. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import Any

_NAMES = {1: "stdout", 2: "stderr"}
_LASTING = (errno.EPIPE, errno.EIO)
"""Errors of a pipe that nobody reads and of a terminal that was closed. A full disk may have space
again."""


class _SurvivingFile(io.FileIO):
    """A standard descriptor. What cannot be written is dropped, and the other standard stream says
    so once."""

    _said = False

    def write(self, data: Any) -> int:
        """Write all of the data: with `python -u` no buffer would write what is left."""
        left = memoryview(data).cast("B")
        while left:
            try:
                written = super().write(left)
            except OSError as error:
                self._survive(error)
                break
            if written is None:  # another program has made the descriptor non-blocking
                select.select([], [self.fileno()], [])
            else:
                left = left[written:]
        return memoryview(data).nbytes

    def _survive(self, error: OSError) -> None:
        number = self.fileno()
        if not self._said:
            self._said = True
            words = (
                f"lightning_3d: cannot write to {_NAMES[number]} ({error.strerror}). The run"
                " continues without this output.\n"
            )
            with contextlib.suppress(OSError):
                os.write(3 - number, words.encode())
        if error.errno in _LASTING:
            _point_to_null(number)  # for those who write by other means


def survive_output() -> None:
    """Let all that is written to `sys.stdout` and `sys.stderr` survive, for the rest of this
    process.

    A stream that a notebook or a test has put there stays. Where a descriptor was closed from the
    start, Python has None.
    """
    for number, name in _NAMES.items():
        stream = getattr(sys, name)
        if stream is None:
            try:
                os.fstat(number)  # a file that was opened since may have got this number
            except OSError:
                _point_to_null(number)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  it is never closed
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):
                stream.flush()
            setattr(sys, name, surviving_stream(number, stream))


def surviving_stream(number: int, like: io.TextIOWrapper | None = None) -> io.TextIOWrapper:
    """Open a standard descriptor for text, with the buffers and the encoding of another stream;
    without one, by lines in UTF-8."""
    raw = _SurvivingFile(number, "w", closefd=False)
    if like is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "replace", line_buffering=True)
    buffer: Any = raw if like.write_through else io.BufferedWriter(raw)
    # a character that an encoding lacks ends no run either
    errors = "backslashreplace" if like.errors == "strict" else like.errors
    return io.TextIOWrapper(
        buffer,
        like.encoding,
        errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def flush_output() -> None:
    """Write what is left in the buffers of standard output and error, if there are any."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _point_to_null(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
