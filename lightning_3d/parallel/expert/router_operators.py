"""What a router does beside its arithmetic, as operators in the graph of a compiled block:
messages, look-ups, and notes of a step.

A compiler cannot look into an operator, so the graph does not end at a router. Operators take
tensors and numbers only. A router is therefore named by `place`, a tensor in host memory: as a
number it would be part of the graph, and each layer would need its own.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Bookkeeping(Protocol):
    """What keeps the numbers of all routers of a model."""

    def total(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Sum `counts` over the ranks that share the tokens: (new tensor, the weight of the running
        micro-batch's loss)."""
        ...

    def note(self, layer: int, numbers: Tensor) -> None:
        """Add to the statistics of a layer."""
        ...


_known: WeakValueDictionary[int, Bookkeeping] = WeakValueDictionary()
_numbers = count()


def register(routers: Bookkeeping) -> int:
    """Give `routers` a number, by which operators find it as long as it lives."""
    number = next(_numbers)
    _known[number] = routers
    return number


def place_of(number: int, layer: int) -> Tensor:
    """Name of a router for operators: the number of its `Bookkeeping`, and its layer."""
    return torch.tensor([number, layer], device="cpu")


@torch.library.custom_op("lightning_3d::router_total", mutates_args=())
def router_total(counts: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """`Bookkeeping.total`. Not differentiable."""
    number, _ = place.tolist()
    totals, weight = _known[number].total(counts)
    return totals, weight.clone()


@router_total.register_fake
def _(counts: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(counts), counts.new_empty((), dtype=torch.float64)


@torch.library.custom_op("lightning_3d::router_note", mutates_args=())
def router_note(weights: Tensor, numbers: Tensor, place: Tensor) -> Tensor:
    """`weights`, in new memory, and `Bookkeeping.note`. A compiler runs it for its result, which
    experts need."""
    number, layer = place.tolist()
    _known[number].note(layer, numbers)
    return weights.clone()


@router_note.register_fake
def _(weights: Tensor, numbers: Tensor, place: Tensor) -> Tensor:
    return torch.empty_like(weights)


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return gradient, None, None


router_note.register_autograd(_pass_on)
