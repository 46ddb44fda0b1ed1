"""Host memory in pages of the operating system, page-locked for copies to and from a GPU where that
is wanted.

torch's own page-locked memory (`pin_memory=True`) is handed out in powers of two: 300 MB take 512
MB (`CachingHostAllocator`). Here the memory that is asked for is registered with CUDA, and is as
large as it needs to be.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Anonymous memory that CUDA forgets before the operating system gets it back."""

    locked_at: int | None = None

    def __del__(self) -> None:
        if self.locked_at is not None:
            with suppress(Exception):  # at the end of the process CUDA may be gone
                torch.cuda.cudart().cudaHostUnregister(self.locked_at)


_may_lock = True


def may_lock() -> bool:
    """False inside of `locking_no_memory`."""
    return _may_lock


@contextmanager
def locking_no_memory(when: bool = True) -> Iterator[None]:
    """While `when` holds, activations that are offloaded use memory that is locked already, or
    memory that is not locked.

    To lock memory, and to give it back, may wait for all that the GPU has been given, also for a
    message that the other rank sends later.
    """
    global _may_lock
    before, _may_lock = _may_lock, _may_lock and not when
    try:
        yield
    finally:
        _may_lock = before


def host_memory(nbytes: int, *, page_locked: bool) -> Tensor:
    """Allocate bytes in host memory, a uint8 tensor.

    Pages have 2 MB where Linux has such: the first write then takes a quarter of the time. Where
    the system lets no more memory be locked (`ulimit -l`) it is not locked; copies to it then make
    the host wait.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    memory = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    if not page_locked:
        return tensor
    # workers of a data loader need none of it, and the kernel would copy locked pages for each
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), nbytes, 0)) == 0:
        memory.locked_at = tensor.data_ptr()
    else:
        # CUDA keeps the error until somebody asks; the next kernel would be blamed for it
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return tensor
