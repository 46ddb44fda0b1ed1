"""What Lightning does with batches, without importing Lightning: its package `lightning_utilities`
walks through containers."""

from __future__ import annotations

from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor


class _Movable(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Tensor) or callable(getattr(type(value), "to", None))


class _Moves(metaclass=_Movable):
    """Any object with a method `to`."""


def move_data_to_device(batch: Any, device: torch.device | str) -> Any:
    """Move the tensors of a batch, in containers and data classes too, as
    `lightning.fabric.utilities.move_data_to_device` does (2.6)."""
    device = torch.device(device)

    def move(value: Any) -> Any:
        waits = device.type in ("cpu", "mps") or not isinstance(value, Tensor)
        moved = value.to(device) if waits else value.to(device, non_blocking=True)
        return value if moved is None else moved  # a method may move in place

    return apply_to_collection(batch, _Moves, move)
