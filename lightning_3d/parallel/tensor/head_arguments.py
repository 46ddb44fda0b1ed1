"""Arguments of an attention with an entry for each head, such as the slopes of ALiBi (Press et al.,
arXiv:2108.12409): each rank takes those of its own heads."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.parallel.specialize import specialize
from lightning_3d.parallel.undone import OF_RANK


@dataclass(frozen=True)
class HeadArgument:
    """A tensor that a module is called with.

    Attributes:
        name: name of the argument.
        dim: its dimension along which the heads lie: (..., n x heads, ...), where n is any number
            of rows.
        heads: number of heads of the whole model.
    """

    name: str
    dim: int
    heads: int


@dataclass(frozen=True)
class Place:
    """This rank among `size` tensor-parallel ranks."""

    rank: int
    size: int


class TakesHeads:
    """Mixin for a module that is called with entries of all heads and gets those of this rank. No
    communication."""

    tp_head_arguments: tuple[HeadArgument, ...]
    tp_place: Place

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for argument in self.tp_head_arguments:
            args, kwargs = part_of_heads(self, args, kwargs, argument, self.tp_place)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def set_for_rank(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute that belongs to this rank's part of a module, and not to the state that a
    step changes."""
    vars(module).setdefault(OF_RANK, set()).add(name)
    setattr(module, name, value)


def take_heads(module: nn.Module, argument: HeadArgument, place: Place) -> None:
    """Let a module take this rank's part of an argument, in place."""
    known: tuple[HeadArgument, ...] = vars(module).get("tp_head_arguments", ())
    if not known:
        specialize(module, TakesHeads)
        set_for_rank(module, "tp_place", place)
    set_for_rank(module, "tp_head_arguments", tuple(dict.fromkeys((*known, argument))))


def bound(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of a call by name."""
    kinds = [kind for kind in type(module).__mro__ if "forward" in vars(kind)]
    # without gates and other mixins
    own = [kind for kind in kinds if not kind.__module__.startswith("lightning_3d.")]
    forward = vars((own or kinds)[0])["forward"]
    return inspect.signature(forward).bind_partial(None, *args, **kwargs)


def part_of_heads(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], argument: HeadArgument, place: Place
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with this rank's part of one of them."""
    call = bound(module, args, kwargs)
    whole = call.arguments.get(argument.name)
    if isinstance(whole, Tensor):
        split = whole.unflatten(argument.dim, (-1, argument.heads))
        local = argument.heads // place.size
        part = split.narrow(argument.dim + 1, place.rank * local, local).flatten(
            argument.dim, argument.dim + 1
        )
        call.arguments[argument.name] = part
    return call.args[1:], call.kwargs
