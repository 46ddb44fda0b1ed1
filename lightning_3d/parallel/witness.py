"""Lets a check see what a rank sends to other ranks within a step, and what it receives from
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Witness(Protocol):
    """Sees tensors before and after they travel."""

    def sends(self, what: str, tensor: Tensor) -> None: ...

    def receives(self, what: str, tensor: Tensor) -> None: ...


_present: list[Witness] = []


@contextmanager
def witnessing(witness: Witness) -> Iterator[None]:
    """Show `witness` what travels meanwhile."""
    _present.append(witness)
    try:
        yield
    finally:
        _present.remove(witness)


def sent(what: str, tensor: Tensor) -> None:
    """Show a tensor that is about to be sent. Costs a look at an empty list where nobody looks."""
    for witness in _present:
        witness.sends(what, tensor)


def received(what: str, tensor: Tensor) -> None:
    """Show a tensor that has arrived, or that contains what has arrived."""
    for witness in _present:
        witness.receives(what, tensor)
