"""Float32 master weights of narrower parameters, and values that something other than the optimizer wrote into the parameters."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE, _PIECE_OF_DEVICE = 2**18, 2**24
"""Elements compared at a time: few enough for a processor's cache, or for what a device or the host has to spare."""


def follow_writes(master: Tensor, written: Tensor) -> None:
    """Copy into the float32 master weights the elements of a parameter that something other than the optimizer wrote.

    Those are the elements that differ from what the master weights round to. Values are compared, piece by piece, because writes through
    `parameter.data`, which weight averaging uses, leave no other trace. On a device nothing is read back: the host does not wait.
    """
    flat = (master, written.detach()) if master.ndim else (master.view(1), written.detach().view(1))
    piece = _PIECE if master.device.type == written.device.type == "cpu" else _PIECE_OF_DEVICE
    rows = max(1, piece * len(flat[0]) // max(1, master.numel()))
    for kept, value in zip(*(tensor.split(rows) for tensor in flat), strict=True):
        followed = _merged(kept, value) if kept.device.type != "cpu" else with_writes(kept, value)
        if followed is not kept:
            kept.copy_(followed)


def with_writes(master: Tensor, written: Tensor) -> Tensor:
    """Return what `follow_writes` would make of the master weights: the same tensor if nothing else wrote, which the host waits for."""
    here = written.detach().to(master.device)
    return master if torch.equal(master.to(here.dtype), here) else _merged(master, here)


def _merged(master: Tensor, written: Tensor) -> Tensor:
    """The elements of `master` that round to those of `written`; elsewhere those of `written`."""
    here = written.to(master.device)
    return torch.where(master.to(here.dtype) == here, master, here.to(master.dtype))
