"""Float32 master weights of narrower parameters, and values that something other than the optimizer
wrote into the parameters."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_3d.compat.torch_fake import is_fake

_PIECE, _PIECE_OF_DEVICE = 2**18, 2**24
"""Elements compared at a time: few enough for a processor's cache, or for what a device or the host
has to spare."""


def follow_writes(master: Tensor, written: Tensor) -> None:
    """Copy into the float32 master weights the elements of a parameter that something other than
    the optimizer wrote.

    Those are the elements that differ from what the master weights round to. Values are compared,
    because writes through `parameter.data`, which weight averaging uses, leave no other trace. On a
    device nothing is read back: the host does not wait. GPUs run one kernel of Triton; otherwise
    the values are compared piece by piece.
    """
    if (kernel := _kernel_for(master, written)) is not None:
        kernel(master, written.detach())
        return
    _follow_in_pieces(master, written)


def _follow_in_pieces(master: Tensor, written: Tensor) -> None:
    flat = (master, written.detach()) if master.ndim else (master.view(1), written.detach().view(1))
    piece = _PIECE if master.device.type == written.device.type == "cpu" else _PIECE_OF_DEVICE
    rows = max(1, piece * len(flat[0]) // max(1, master.numel()))
    for kept, value in zip(*(tensor.split(rows) for tensor in flat), strict=True):
        followed = _merged(kept, value) if kept.device.type != "cpu" else with_writes(kept, value)
        if followed is not kept:
            kept.copy_(followed)


def with_writes(master: Tensor, written: Tensor) -> Tensor:
    """Return what `follow_writes` would make of the master weights: the same tensor if nothing else
    wrote, which the host waits for."""
    here = written.detach().to(master.device)
    return master if torch.equal(master.to(here.dtype), here) else _merged(master, here)


def _merged(master: Tensor, written: Tensor) -> Tensor:
    """The elements of `master` that round to those of `written`; elsewhere those of `written`."""
    here = written.to(master.device)
    return torch.where(master.to(here.dtype) == here, master, here.to(master.dtype))


_Kernel = Callable[[Tensor, Tensor], None]


def _kernel_for(master: Tensor, written: Tensor) -> _Kernel | None:
    """The kernel that follows these writes; None where there is none."""
    if master.device.type != "cuda" or master.device != written.device or is_fake(master):
        return None
    fits = (
        master.dtype == torch.float32
        and master.numel() > 0
        and master.is_contiguous()
        and written.is_contiguous()
    )
    return _tried_kernel(master.device, written.dtype) if fits else None


@functools.cache
def _tried_kernel(device: torch.device, dtype: torch.dtype) -> _Kernel | None:
    """Triton's kernel, after it has done on this device what `_merged` does. The host waits for
    that, once."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        from lightning_3d.parallel.zero.outside_writes_kernel import follow

        failure = None if is_right(follow, device, dtype) else "its result is wrong"
    except Exception as error:
        # Triton needs a compiler and the headers of Python, and each of its versions fails in its
        # own way
        failure = f"{type(error).__name__}: {error}"
    if failure is None:
        return follow
    rank_zero_warn(
        "Triton's kernel that compares float32 master weights with parameters cannot be used on"
        f" {device} ({failure}). Operations of torch do the same, and need six times its memory"
        " traffic: some percent of a step."
    )
    return None


def is_right(kernel: _Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel does what the operations of torch do: for values of all sizes, those between
    two numbers of `dtype`, and NaN."""
    count = 10_007  # no whole number of blocks
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (count,), generator=generator, dtype=torch.int64).to(
        torch.int32
    )
    # at and beside the middle between two numbers of bf16
    bits[:5000] = bits[:5000] & ~0xFFFF | 0x8000 | (bits[:5000] & 1)
    master = bits.view(torch.float32)
    written = master.to(dtype)
    written[::7] = torch.randn(len(written[::7]), generator=generator).to(dtype)
    written[::1001] = torch.nan
    found, wanted = master.to(device, copy=True), _merged(master, written)
    kernel(found, written.to(device))
    return torch.equal(found.cpu().nan_to_num(nan=12345.0), wanted.nan_to_num(nan=12345.0))
