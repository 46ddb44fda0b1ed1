"""The simulated libraries, as Python calls them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(sys.prefix) / "simulated_cuda"
"""Where the libraries of this environment are."""

COUNTED = ("stream", "event", "device", "frees", "host allocations", "pageable copies")
"""What is counted: waits of the host for a stream, an event or a device, cudaFree, cudaHostAlloc,
and copies from or to pageable memory."""

_runtime: ctypes.CDLL | None = None


def load() -> None:
    """Load every simulated library, before torch looks for the real ones."""
    global _runtime
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    for library in sorted(
        FOLDER.glob("lib*.so*"), key=lambda path: ("cudart" not in path.name, path.name)
    ):
        loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        _runtime = _runtime or loaded
    if _runtime is None:
        raise ImportError(
            f"There are no simulated CUDA libraries in {FOLDER}. Run `make test-cuda`, which builds"
            " them."
        )
    addresses = ctypes.POINTER(ctypes.c_ulong)
    _runtime.cudasim_kernel.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_int,
        addresses,
        addresses,
        ctypes.POINTER(ctypes.c_ubyte),
    ]
    _runtime.cudasim_kernel.restype = ctypes.c_char_p
    _runtime.cudasim_host_view.argtypes = [ctypes.c_ulong]
    _runtime.cudasim_host_view.restype = ctypes.c_ulong
    _runtime.cudasim_count.restype = ctypes.c_long


def _library() -> ctypes.CDLL:
    if _runtime is None:
        raise ImportError("torch was imported before the simulated CUDA libraries were loaded")
    return _runtime


def configure() -> None:
    """Read the variables CUDASIM_* again, in a forked process that has changed them. CUDA must not
    have been used yet."""
    _library().cudasim_configure()


def synchronizations() -> dict[str, int]:
    """How often this process has waited so far, by the names in `COUNTED`."""
    return {name: _library().cudasim_count(which) for which, name in enumerate(COUNTED)}


def host_view(address: int) -> int:
    """Address at which this process may touch the bytes of a device address."""
    return _library().cudasim_host_view(address)


def launch(
    stream: int, device: int, *, lazy: bool, name: str, accesses: Sequence[tuple[int, int, bool]]
) -> None:
    """Wait until a kernel may run on ``stream``: everything before it there has run.

    Args:
        lazy: this is the kernel's first launch, and lazy loading may wait for the whole device.
        accesses: (address, bytes, whether it writes) for each range of device memory.

    Raises:
        RuntimeError: an access is not ordered behind an earlier one of another stream.
    """
    n = len(accesses)
    addresses, sizes, writes = (
        (ctypes.c_ulong * n)(),
        (ctypes.c_ulong * n)(),
        (ctypes.c_ubyte * n)(),
    )
    for i, (address, size, write) in enumerate(accesses):
        addresses[i], sizes[i], writes[i] = address, size, write
    error = _library().cudasim_kernel(
        stream, device, int(lazy), name.encode(), n, addresses, sizes, writes
    )
    if error is not None:
        raise RuntimeError(error.decode())
