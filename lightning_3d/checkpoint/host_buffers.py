"""Host memory for the tensors of a background save."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from torch import Tensor

from lightning_3d.compat.host_memory import host_memory

_ALIGNMENT = 64
"""Alignment of every tensor, in bytes."""

Key = TypeVar("Key", bound=Hashable)


def like(parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Allocate contiguous host tensors of the same shapes and dtypes: one piece of memory for those
    of the host, and one, page-locked so that a stream can copy them, for those of GPUs.
    """
    made: dict[Key, Tensor] = {}
    for on_gpu in (False, True):
        chosen = {key: part for key, part in parts.items() if part.is_cuda == on_gpu}
        memory = host_memory(sum(_aligned(part) for part in chosen.values()), page_locked=on_gpu)
        start = 0
        for key, part in chosen.items():
            made[key] = memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            start += _aligned(part)
    return {key: made[key] for key in parts}


def _aligned(part: Tensor) -> int:
    return part.nbytes + -part.nbytes % _ALIGNMENT
