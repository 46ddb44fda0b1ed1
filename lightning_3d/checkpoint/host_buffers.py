"""Memory on the host for what a save in the background writes."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Bytes; of every tensor."""

Key = TypeVar("Key", bound=Hashable)


def like(parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """New contiguous tensors on the host, of the same shapes and types; pinned where the part is a GPU's, so that its stream can copy."""
    starts, nbytes = {}, 0
    for key, part in parts.items():
        if not part.is_cuda:
            starts[key] = nbytes
            nbytes += part.nbytes + -part.nbytes % _ALIGNMENT
    memory = _huge_pages(nbytes)
    made = {}
    for key, part in parts.items():
        if part.is_cuda:
            made[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        else:
            made[key] = memory[starts[key] : starts[key] + part.nbytes].view(part.dtype).view(part.shape)
    return made


def _huge_pages(nbytes: int) -> Tensor:
    """Bytes in pages of 2 MB where Linux gives them: what is written there first takes a quarter of the time."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
