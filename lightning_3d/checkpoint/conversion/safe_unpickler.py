"""Read files of `torch.save` as data: no code in them runs, and tensors are mapped, not loaded."""

from __future__ import annotations

import argparse
import pathlib
import pickle
import re
import zipfile
from collections.abc import Callable
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import torch

from lightning_3d.errors import CheckpointError, listed


class StandIn:
    """Placeholder for an object whose class is not needed. It accepts the object's state and
    ignores it."""

    def __new__(cls, *args: Any) -> StandIn:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


_PLAIN: list[Any] = [
    argparse.Namespace,
    timedelta,
    pathlib.PosixPath,
    (pathlib.PosixPath, "pathlib._local.PosixPath"),
    (numpy.dtype, "numpy.dtype"),
    (numpy.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
    (numpy.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
    *(type(numpy.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "b1")),
]
"""Classes that hold nothing but values."""

Known = list[tuple[Callable[..., Any], str]]
"""Placeholders of classes, by the full name of the class in the file."""


def load(
    path: Path | BytesIO,
    known: Known | None = None,
    source: str | None = None,
    *,
    plain_only: bool = False,
) -> Any:
    """Load the contents of a file of `torch.save` without running code in it.

    Args:
        path: the file.
        known: further classes that are allowed.
        source: name of the file in messages.
        plain_only: whether to replace objects of other classes by a `StandIn`, instead of raising.

    Raises:
        CheckpointError: the file needs a class that may run code, or cannot be read.
    """
    allowed: list[Any] = [*_PLAIN, *(known or [])]
    named = source or f"{path}"
    try:
        if not zipfile.is_zipfile(path):
            with torch.serialization.safe_globals(allowed):
                return torch.load(path, map_location="cpu", weights_only=True)
        names = {
            entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__name__}"
            for entry in allowed
        }
        if isinstance(path, BytesIO):
            path.seek(0)
        found = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - names
        asked = sorted(
            found, key=lambda name: (name.startswith(("builtins.", "collections.")), name)
        )
        if asked and not plain_only:
            raise CheckpointError(_refused(named, asked))
        allowed += [(StandIn, name) for name in asked]
        if isinstance(path, BytesIO):
            path.seek(0)
        with torch.serialization.safe_globals(allowed):
            return torch.load(
                path, map_location="cpu", weights_only=True, mmap=isinstance(path, Path)
            )
    except (
        OSError,
        RuntimeError,
        EOFError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        # in the format of torch before 1.6
        asked = re.findall(r"GLOBAL ([\w.]+) was not", str(error))
        damaged = (
            f"{named} cannot be read: it is damaged, or not a file of torch.save"
            f" ({type(error).__name__})."
        )
        raise CheckpointError(_refused(named, asked) if asked else damaged) from error


def _refused(named: str, asked: list[str]) -> str:
    return (
        f"{named} was not loaded: it contains {listed(asked[:5])}, which is not plain data, and"
        " loading it would run code. Use --plain-only to leave it out, or save the checkpoint"
        " without it."
    )
