"""State of a block that a recomputation must see again: the code around the first forward may have
changed it for that call only.

`torch.func.functional_call` puts other tensors in the place of parameters, and a context may switch
an adapter off or a flag on. Both are over when the backward repeats the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_PLAIN = frozenset({bool, int, float, str, type(None)})
_LISTS = (list, tuple)
_HOLDERS = ("_parameters", "_buffers")


class SeenState:
    """Parameters, buffers and plain attributes of modules, as they are now.

    Args:
        modules: the block and everything in it.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._tensors = [
            (holder, dict(holder))
            for module in modules
            for key in _HOLDERS
            if (holder := vars(module)[key])
        ]
        self._plain = [(vars(module), _plain_values(module)) for module in modules]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context in which the modules have this state. What they had before, they have afterwards:
        a counter counts one call."""
        before = SeenState(self._modules)
        self._put()
        try:
            yield
        finally:
            before._put()

    def _put(self) -> None:
        for place, seen in self._tensors:
            for key, value in seen.items():
                if key in place and place[key] is not value:
                    place[key] = value
        for place, seen in self._plain:
            for key, value in seen.items():
                if place.get(key, value) is not value and _is_plain(place[key]):
                    place[key] = value


def repeating(forward: Callable[..., Any], modules: Sequence[nn.Module]) -> Callable[..., Any]:
    """Return `forward` of some modules. When it runs again, they have the state in which it ran
    first."""
    seen: list[SeenState] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not seen:
            seen.append(SeenState(modules))
            return forward(*args, **kwargs)
        with seen[0].again():
            return forward(*args, **kwargs)

    return run


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Collect the plain attributes of a module. Blocks do this several times a micro-batch, so most
    attributes cost no call."""
    found = vars(module).items()
    return {
        key: value
        for key, value in found
        if type(value) in _PLAIN or (type(value) in _LISTS and _is_plain(value))
    }


def _is_plain(value: Any) -> bool:
    """Return whether a value is a flag, a number, a name or some names. Tensors in attributes would
    be kept in memory."""
    return type(value) in _PLAIN or (
        type(value) in _LISTS and all(type(item) is str for item in value)
    )
