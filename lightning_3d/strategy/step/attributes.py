"""Attributes of modules that a user's step changes, such as counters and lists: what they were, and how to put it back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric

from lightning_3d.models.reachable import is_core
from lightning_3d.parallel.tensor.head_arguments import OF_RANK

_TORCH_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module. Parameters, buffers, submodules and hooks are among them."""

_NO_ATTRIBUTE = object()


@dataclass(frozen=True)
class _Kept:
    """A value, and what it contained.

    Attributes:
        put_back: function that gives `value` its contents again.
    """

    value: Any
    put_back: Callable[[], None]


class Attributes:
    """The attributes of a module, its submodules, and the user's own objects that these have, at the time of creation.

    Numbers, texts, plain containers and tensors in attributes come back. Objects of other packages are only put back where they were.

    Args:
        root: the user's module. Objects whose classes are in its package, too, are the user's own.
    """

    def __init__(self, root: nn.Module) -> None:
        self._package = type(root).__module__.partition(".")[0]
        self._owners: dict[int, tuple[dict[str, Any], dict[str, _Kept]]] = {}
        self._of_libraries: set[int] = set()
        for module in root.modules():
            if is_core(type(module)):
                self._of_libraries.add(id(vars(module)))
            if not isinstance(module, Metric):
                self._keep_attributes(vars(module))

    def restore(self) -> None:
        """Put the attributes back."""
        for attributes, kept in self._owners.values():
            # The self-check runs in the first forward, and what it has set belongs to the rank, not to the step.
            stays = _TORCH_OWN | attributes.get(OF_RANK, set()) | {OF_RANK}
            # A library may note in a new attribute what it has installed, such as hooks, which stay.
            new = [] if id(attributes) in self._of_libraries else [name for name in attributes if name not in kept and name not in stays]
            for name in new:
                del attributes[name]
            for name, one in kept.items():
                if name in stays:
                    continue
                one.put_back()
                if attributes.get(name, _NO_ATTRIBUTE) is not one.value:
                    attributes[name] = one.value

    def _keep_attributes(self, attributes: dict[str, Any]) -> None:
        if id(attributes) in self._owners:
            return
        kept: dict[str, _Kept] = {}
        self._owners[id(attributes)] = attributes, kept  # before the values, which may lead back here
        for name, value in list(attributes.items()):
            if name not in _TORCH_OWN:
                kept[name] = _Kept(value, self._keep(value))

    def _keep(self, value: Any) -> Callable[[], None]:
        """Return a function that gives a value the contents that it has now."""
        if type(value) in (list, deque):
            return _sequence(value, [self._keep(item) for item in value])
        if isinstance(value, dict):
            return _mapping(value, [self._keep(item) for item in value.values()])
        if type(value) is set:
            return _set(value)
        if type(value) is tuple:
            return _each([self._keep(item) for item in value])
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            return _tensor(value)
        if self._is_own(value):
            self._keep_attributes(vars(value))
        return _nothing

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, (nn.Module, type)) or callable(value) or not hasattr(value, "__dict__"):
            return False
        return type(value).__module__.partition(".")[0] == self._package


def _nothing() -> None:
    """Put nothing back."""


def _each(parts: list[Callable[[], None]]) -> Callable[[], None]:
    wanted = [part for part in parts if part is not _nothing]
    if not wanted:
        return _nothing

    def put_back() -> None:
        for part in wanted:
            part()

    return put_back


def _sequence(value: list[Any] | deque[Any], parts: list[Callable[[], None]]) -> Callable[[], None]:
    items, inside = list(value), _each(parts)

    def put_back() -> None:
        inside()
        if len(value) != len(items) or any(new is not old for new, old in zip(value, items, strict=True)):
            value.clear()
            value.extend(items)

    return put_back


def _mapping(value: dict[Any, Any], parts: list[Callable[[], None]]) -> Callable[[], None]:
    items, inside = dict(value), _each(parts)

    def put_back() -> None:
        inside()
        if list(value) != list(items) or any(value[key] is not item for key, item in items.items()):
            value.clear()
            value.update(items)

    return put_back


def _set(value: set[Any]) -> Callable[[], None]:
    items = set(value)

    def put_back() -> None:
        value.clear()
        value.update(items)

    return put_back


def _tensor(value: Tensor) -> Callable[[], None]:
    """Put the numbers of a tensor back if something has written into it. One with a gradient is a result, into which nothing writes."""
    if value.grad_fn is not None or value.is_inference() or value.is_meta or type(value) is not Tensor:
        return _nothing
    version, copy = value._version, value.detach().clone()

    def put_back() -> None:
        if value._version != version:
            value.detach().copy_(copy)

    return put_back
