"""Errors of torch that mean that memory ran out, and torch's picture of a GPU's memory."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

_TEXTS = ("can't allocate memory", "out of memory", "bad_alloc", "not enough memory")
_ASKED = re.compile(
    r"(?:tried to allocate|allocate) (?:([\d.]+) (GiB|MiB|KiB)|(\d+) bytes)", re.IGNORECASE
)
_UNITS = {"gib": 2**30, "mib": 2**20, "kib": 2**10}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of a GPU or of the machine ran out.

    On a GPU torch raises `OutOfMemoryError`; on a CPU a RuntimeError whose text names the allocator
    (torch 2.8 to 2.13).
    """
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def bytes_asked(error: BaseException) -> int | None:
    """Return the bytes that could not be allocated, from the text of an error; None where it does
    not say."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    number, unit, whole = found.groups()
    return int(whole) if whole else int(float(number) * _UNITS[unit.lower()])


def write_gpu_memory(path: Path) -> bool:
    """Write what is in the memory of this process's GPU, for pytorch.org/memory_viz. Returns False
    where that does not work.

    `torch.cuda.memory._snapshot` is not public (torch 2.8 to 2.13).
    """
    import torch

    try:
        path.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
    except (RuntimeError, OSError, pickle.PicklingError):
        return False
    return True
