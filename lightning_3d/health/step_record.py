"""Records what a rank computes in forward and backward, as hashes in the order in which it happens,
so that two runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.health.bit_hash import hash_bits
from lightning_3d.parallel.nested import tensors_of
from lightning_3d.parallel.witness import witnessing


@dataclass(frozen=True)
class Event:
    """One result in a step.

    Attributes:
        what: for messages, such as "the output of model.layers.0.mlp.up_proj".
        arrived: whether it came from other ranks, so that this rank did not compute it.
        value: hash of its bits.
    """

    what: str
    arrived: bool
    value: int


class StepRecorder:
    """Hashes outputs of layers, gradients of parameters, and what is sent and received. The host
    does not wait before `take`.

    Args:
        module: this rank's part of the model.
        layers: whether to look at the outputs of layers. False where blocks are compiled: hooks
            would compile them again.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, layers: bool) -> None:
        self._module, self._device, self._layers = module, device, layers
        self._events: list[tuple[str, bool, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record meanwhile."""
        with ExitStack() as stack:
            stack.enter_context(witnessing(self))
            for name, child in self._module.named_modules() if self._layers else ():
                if next(child.children(), None) is None:
                    stack.callback(child.register_forward_hook(self._sees_output(name)).remove)
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_hook(self._sees_gradient(name)).remove)
            yield

    def sends(self, what: str, tensor: Tensor) -> None:
        self._note(f"what it sends in {_article(what)} {what}", (tensor,))

    def receives(self, what: str, tensor: Tensor) -> None:
        self._note(f"what arrives in {_article(what)} {what}", (tensor,), arrived=True)

    def note_result(self, gradients: Sequence[Tensor], loss: float) -> None:
        """Add what the step leaves: the reduced gradients, which all ranks have contributed to, and
        the loss."""
        self._note("the reduced gradients", tuple(gradients), arrived=True)
        self._note("the loss", (torch.tensor(loss, dtype=torch.float64),), arrived=True)

    def take(self) -> list[Event]:
        """Return the events since the last call, and forget them. Waits for the device."""
        events, self._events = self._events, []
        values = torch.stack([value for _, _, value in events]).tolist() if events else []
        return [
            Event(what, arrived, value)
            for (what, arrived, _), value in zip(events, values, strict=True)
        ]

    def _sees_output(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            self._note(f"the output of {name or type(module).__name__}", tuple(tensors_of(output)))

        return note

    def _sees_gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(gradient: Tensor) -> None:
            self._note(f"the gradient of {name}", (gradient,))

        return note

    def _note(self, what: str, tensors: tuple[Tensor, ...], *, arrived: bool = False) -> None:
        plain = (
            tensor.detach()
            for tensor in tensors
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_sparse
        )
        self._events.append((what, arrived, hash_bits(plain, self._device)))


def first_difference(one: Sequence[Event], other: Sequence[Event]) -> Event | None:
    """Return the first event of `one` that is different in `other`; None if all are equal."""
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return mine
    longer = one if len(one) > len(other) else other
    return longer[min(len(one), len(other))] if len(one) != len(other) else None


def _article(what: str) -> str:
    return "an" if what[:1] in "aeiou" else "a" if not what.endswith("states") else "the"
