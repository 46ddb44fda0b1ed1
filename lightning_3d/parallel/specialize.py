"""Change of an object's class to a subclass of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MADE: dict[tuple[type, ...], type] = {}


def combined(name: str, *bases: type) -> type:
    """A class with these bases and the module of the last one, made once: a compiler treats objects
    of two classes as different."""
    made = _MADE.get(bases)
    if made is None:
        made = _MADE[bases] = type(name, bases, {"__module__": bases[-1].__module__})
    return made


class OwnForward:
    """Mixin for an object whose `forward` the user has replaced, so that those of other mixins can
    call it."""

    own_forward: Callable[..., Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


def specialize(module: Any, mixin: type, **attributes: Any) -> None:
    """Make `module` an instance of a subclass of its own class with `mixin` in front; names, hooks
    and isinstance stay."""
    kind = type(module)
    if hasattr(mixin, "forward") and (own := vars(module).pop("forward", None)) is not None:
        kind, attributes["own_forward"] = combined(kind.__name__, OwnForward, kind), own
    module.__class__ = combined(kind.__name__, mixin, kind)
    for name, value in attributes.items():
        object.__setattr__(module, name, value)
