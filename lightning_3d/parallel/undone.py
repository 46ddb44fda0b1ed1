"""What code changes while it runs: snapshots of all that it reaches, which can be compared and put
back.

Trials of modules leave nothing behind: what their code and hooks wrote, counted, appended or drew
is as before. The proof of the loss runs the user's step again from the same state, and asks what it
wrote.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_3d.compat.torch import global_hooks
from lightning_3d.models.reachable import (
    TRUSTED,
    Named,
    home_of,
    hook_tables,
    is_core,
    is_of_others,
    is_trusted,
    parts_of,
)
from lightning_3d.parallel.default_dtype import default_dtype

OF_RANK = "attributes_of_rank"
"""Attribute of a module with the names of those that `set_for_rank` has set: they belong to the
rank."""

_MOST_VALUES = 200_000
_MOST_BYTES = 2**28
"""Bytes of all tensors that are kept, besides buffers."""

_TORCH_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module. Parameters, submodules and hooks are among them."""

_NOTHING = object()

Snapshot = list[Any]
"""The state of each place."""


@contextmanager
def isolated_generators() -> Iterator[None]:
    """Restore the generators and the default dtype afterwards."""
    numpy = sys.modules.get("numpy")
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with default_dtype(torch.get_default_dtype()):
            yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])


@contextmanager
def undone(module: nn.Module) -> Iterator[None]:
    """Restore afterwards all that the code of a module reaches, and the generators of random
    numbers.

    That is containers, attributes, closures, globals and class attributes of the user's own code,
    tensors in them, and their gradients. What a hook writes to a file, or keeps in a library,
    stays.

    Args:
        module: what is tried. A copy too reaches globals, classes, and what has no copy.
    """
    places = Places([("", module), *(("", hook) for _, hook in global_hooks())])
    before = places.now()
    on_device = (
        torch.cuda.get_rng_state()
        if torch.cuda.is_available() and torch.cuda.is_initialized()
        else None
    )
    with isolated_generators():
        try:
            yield
        finally:
            places.restore(before)
            if on_device is not None:
                torch.cuda.set_rng_state(on_device)


def places_of_step(module: nn.Module) -> Places:
    """Find what the user's step, model and hooks may change while they train, besides parameters,
    gradients and metrics.

    Objects of libraries and of this package stay as they are.
    """
    hooks = [
        hook
        for child in module.modules()
        for table in hook_tables(child).values()
        for hook in table.values()
    ]
    hooks += [hook for _, hook in global_hooks()]
    reached = [("hook", hook) for hook in hooks if is_of_others(hook)]
    return Places([*reached, ("self", module)], trains=True)


@dataclass(frozen=True)
class _Place:
    """One place with a state.

    Attributes:
        label: name of the place for users.
        read: function that returns its state.
        write: function that puts a state back.
        draws: whether it is a generator of random numbers.
        named: "." for a state with the values of attributes, "[" for one with those of keys, "" for
            other states.
    """

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    draws: bool = False
    named: str = ""

    def name(self, key: Any) -> str:
        """Name of an attribute or key."""
        return f"{self.label}[{key!r}]" if self.named == "[" else f"{self.label}.{key}"


class Places:
    """All places with a state that values lead to.

    Args:
        values: with their labels.
        trains: whether they belong to a model in training. Then gradients, objects of libraries and
            of this package stay as they are.
    """

    def __init__(self, values: list[tuple[str, Any]], *, trains: bool = False) -> None:
        self._trains = trains
        self._places: list[_Place] = []
        self._seen: dict[Any, Any] = {}  # with the values, so that no other gets their ids
        self._bytes = 0
        waiting = list(values)
        while waiting and len(self._seen) < _MOST_VALUES:
            label, value = waiting.pop()
            key = (id(value.owner), value.names) if isinstance(value, Named) else id(value)
            if key in self._seen or isinstance(value, (str, bytes, int, float, type(None))):
                continue
            self._seen[key] = value
            with suppress(Exception):  # of properties and containers of the user's own
                waiting += self._visit(label, value)

    def now(self) -> Snapshot:
        """Return the state of each place."""
        states: Snapshot = []
        with torch.no_grad():
            for place in self._places:
                states.append(_NOTHING)
                with suppress(Exception):
                    states[-1] = place.read()
        return states

    def restore(self, states: Snapshot, *, draws_only: bool = False) -> None:
        """Put states back.

        Args:
            draws_only: whether to restore generators of random numbers alone.
        """
        with torch.no_grad():
            for place, state in reversed(list(zip(self._places, states, strict=True))):
                if state is _NOTHING or (draws_only and not place.draws):
                    continue
                with suppress(Exception):
                    place.write(state)

    def changed(self, before: Snapshot, after: Snapshot) -> dict[str, Any]:
        """Return the new values of what differs, by label, without generators of random numbers."""
        found: dict[str, Any] = {}
        for place, old, new in zip(self._places, before, after, strict=True):
            if place.draws or old is _NOTHING or new is _NOTHING:
                continue
            if not place.named:
                found |= {} if _same(old, new) else {place.label: new}
                continue
            names = [
                name
                for name in {**old, **new}
                if not _same(old.get(name, _NOTHING), new.get(name, _NOTHING))
            ]
            found |= {place.name(name): new.get(name) for name in names}
        return found

    # The places

    def _visit(self, label: str, value: Any) -> list[tuple[str, Any]]:
        """Add the place of a value. Returns what it leads to."""
        if self._trains and isinstance(value, nn.Module):
            return self._visit_module(label, value)
        if self._trains and self._stays(value):
            return []
        self._add(label, value)
        if isinstance(value, dict):
            return [(f"{label}[{key!r}]", item) for key, item in dict.items(value)]
        parts = parts_of(value)
        if isinstance(value, (list, tuple, deque, set)):
            return [(label, part) for _, part in parts]
        return [(f"{label}.{name}" if self._trains else "", part) for name, part in parts]

    def _visit_module(self, label: str, module: nn.Module) -> list[tuple[str, Any]]:
        """Add the attributes and buffers of a module in training."""
        inside = [(f"{label}.{name}", child) for name, child in module._modules.items()]
        if isinstance(module, Metric):
            return inside
        attributes, of_library = vars(module), is_core(type(module))

        def read() -> dict[str, Any]:
            # The self-check runs in the first forward, and what it has set belongs to the rank, not
            # to the step.
            stays = _TORCH_OWN | attributes.get(OF_RANK, set()) | {OF_RANK}
            mine = {
                name: item
                for name, item in attributes.items()
                if name not in stays and not _is_of_package(name, item)
            }
            return {name: _copied(item) for name, item in mine.items()}

        def delete(name: str) -> None:
            # A library may note in a new attribute what it has installed, such as hooks, which
            # stay.
            if not of_library:
                del attributes[name]

        def put(name: str, item: Any) -> None:
            if name not in attributes.get(OF_RANK, set()):
                attributes[name] = item

        self._places.append(_names(label, read, put, delete))
        buffers = module._buffers
        self._places.append(
            _names(label, lambda: dict(buffers), buffers.__setitem__, buffers.__delitem__)
        )
        for name, buffer in buffers.items():
            if buffer is not None:
                self._add_tensor(f"{label}.{name}", buffer, limited=False)
                self._seen[id(buffer)] = buffer
        own = [(f"{label}.{name}", item) for name, item in read().items()]
        return [(type(module).__name__, type(module)), *inside, *own]

    def _stays(self, value: Any) -> bool:
        """Return whether an object is of a library or of this package, whose states belong to other
        things than the step."""
        home = home_of(type(value))
        if isinstance(value, Named) or home == "builtins":
            return False
        if home.startswith("lightning_3d."):
            return True
        if isinstance(
            value, (dict, functools.partial, random.Random, torch.Generator, Tensor)
        ) or not hasattr(value, "__dict__"):
            return False
        return is_trusted(type(value)) or _is_installed(home.partition(".")[0])

    def _add(self, label: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add_tensor(label, value)
        elif isinstance(value, Named):
            self._add_named(label, value)
        elif isinstance(value, CellType):
            self._places.append(
                _Place(
                    label,
                    lambda: _copied(value.cell_contents),
                    lambda state: setattr(value, "cell_contents", _copied(state)),
                )
            )
        elif isinstance(value, dict):
            self._places.append(
                _Place(
                    label,
                    lambda: _items(value),
                    lambda state: _refill_dict(value, state),
                    named="[",
                )
            )
        elif isinstance(value, (list, deque, bytearray)):
            self._places.append(
                _Place(
                    label,
                    lambda: [_copied(item) for item in value],
                    lambda state: _refill(value, state),
                )
            )
        elif isinstance(value, set):
            self._places.append(
                _Place(label, lambda: set(value), lambda state: _refill_set(value, state))
            )
        elif isinstance(value, torch.Generator):
            self._places.append(_Place(label, value.get_state, value.set_state, draws=True))  # type: ignore[arg-type]
        elif isinstance(value, random.Random):
            self._places.append(_Place(label, value.getstate, value.setstate, draws=True))
        elif hasattr(type(value), "bit_generator"):  # of NumPy
            numbers = value.bit_generator
            self._places.append(
                _Place(
                    label,
                    lambda: copy.deepcopy(numbers.state),
                    lambda state: setattr(numbers, "state", state),
                    draws=True,
                )
            )
        elif isinstance(value, type):
            self._add_class(value)
        elif not isinstance(value, ModuleType) and hasattr(value, "__dict__"):
            attributes = vars(value)
            self._places.append(
                _Place(
                    label,
                    lambda: _items(attributes),
                    lambda state: _refill_dict(attributes, state),
                    named=".",
                )
            )

    def _add_tensor(self, label: str, tensor: Tensor, *, limited: bool = True) -> None:
        if tensor.is_leaf and tensor.requires_grad and not self._trains:
            self._places.append(
                _Place(
                    label,
                    lambda: None if tensor.grad is None else tensor.grad.clone(),
                    lambda state: setattr(tensor, "grad", state),
                )
            )
        if isinstance(tensor, nn.Parameter) or tensor.is_meta or tensor.is_inference():
            return
        if self._trains and (tensor.grad_fn is not None or type(tensor) is not Tensor):
            return  # a result, into which nothing writes, or a part of something
        if limited:
            self._bytes += tensor.nbytes
            if self._bytes > _MOST_BYTES:
                return
        numbers = _Numbers(tensor)
        self._places.append(_Place(label, numbers.read, numbers.write))

    def _add_named(self, label: str, named: Named) -> None:
        owner = named.owner if isinstance(named.owner, dict) else vars(named.owner)
        if (
            isinstance(named.owner, ModuleType)
            and named.owner.__name__.partition(".")[0] in TRUSTED
        ):
            return  # what libraries load late stays
        home = owner.get("__name__", label)

        def read() -> dict[str, Any]:
            return {name: _copied(owner[name]) for name in named.names if name in owner}

        self._places.append(_names(home, read, owner.__setitem__, owner.__delitem__))

    def _add_class(self, kind: type) -> None:
        if is_core(kind):
            return

        def read() -> dict[str, Any]:
            return {name: value for name, value in vars(kind).items() if not name.startswith("__")}

        def set_one(name: str, value: Any) -> None:
            setattr(kind, name, value)

        def delete_one(name: str) -> None:
            delattr(kind, name)

        self._places.append(_names(kind.__name__, read, set_one, delete_one))


def _names(
    label: str,
    read: Callable[[], dict[str, Any]],
    set_one: Callable[[str, Any], None],
    delete_one: Callable[[str], None],
) -> _Place:
    """A place with names, of which each is set by itself."""

    def write(state: dict[str, Any]) -> None:
        present = read()
        for name in present:
            if name not in state:
                delete_one(name)
        for name, value in state.items():
            if present.get(name, _NOTHING) is not value:
                set_one(name, _copied(value))

    return _Place(label, read, write, named=".")


@dataclass
class _Numbers:
    """The numbers of a tensor, of which there is one copy as long as they stay the same."""

    tensor: Tensor
    last: Tensor | None = field(default=None)

    def read(self) -> Tensor:
        if self.last is None or not _same(self.last, self.tensor):
            self.last = self.tensor.detach().clone()
        return self.last

    def write(self, state: Tensor) -> None:
        if self.tensor.shape != state.shape:
            self.tensor.data = state.clone()
        elif not _same(self.tensor, state):
            self.tensor.detach().copy_(state)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are the same, or equal numbers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (
            one.shape == other.shape
            and one.dtype == other.dtype
            and one.device == other.device
            and torch.equal(one, other)
        )
    if isinstance(one, (list, deque, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (int, float, complex, str, bytes, set, bytearray)):
        return bool(one == other)
    return isinstance(one, count) and repr(one) == repr(other)


def _is_of_package(name: str, value: Any) -> bool:
    """Return whether this package has set an attribute of a module, such as the `log` of a running
    step."""
    function = getattr(value, "__func__", value)
    return name.startswith("_lightning_3d") or home_of(function).startswith("lightning_3d.")


def _is_installed(package: str) -> bool:
    """Return whether a package is installed, so that it is not the user's own."""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])]
    return any("site-packages" in place or "dist-packages" in place for place in places)


def _copied(value: Any) -> Any:
    """Copy a counter, which has no state to set; everything else is the object itself."""
    return copy.copy(value) if isinstance(value, count) else value


def _items(value: dict[Any, Any]) -> dict[Any, Any]:
    return {key: _copied(item) for key, item in dict.items(value)}


def _refill_dict(into: dict[Any, Any], items: dict[Any, Any]) -> None:
    if len(into) == len(items) and all(
        key in items and items[key] is value for key, value in dict.items(into)
    ):
        return
    dict.clear(into)
    dict.update(into, _items(items))


def _refill_set(into: set[Any], members: set[Any]) -> None:
    into.clear()
    into.update(members)


def _refill(into: Any, items: list[Any]) -> None:
    if len(into) == len(items) and all(
        one is other for one, other in zip(into, items, strict=True)
    ):
        return
    into.clear()
    into.extend([_copied(item) for item in items])
