"""Trials of modules leave nothing behind: what their code and hooks wrote, counted, appended or drew is as before."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from types import CellType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.compat.torch import global_hooks
from lightning_3d.models.reachable import TRUSTED, Named, home_of, hook_tables, is_core, is_of_others, parts_of
from lightning_3d.parallel.default_dtype import default_dtype

_MOST_VALUES = 200_000
_MOST_BYTES = 2**28
"""Bytes of all tensors that are kept."""


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
    """Restore afterwards all that the code of a module reaches, and the generators of random numbers.

    That is containers, attributes, closures, globals and class attributes of the user's own code, tensors in them, and their gradients.
    What a hook writes to a file, or keeps in a library, stays.

    Args:
        module: what is tried. A copy too reaches globals, classes, and what has no copy.
    """
    with _undone(_Kept(), [module]):
        yield


@contextmanager
def hooks_undone(module: nn.Module) -> Iterator[None]:
    """Restore afterwards what the user's hooks on a model in training, and its step, keep outside of modules.

    Gradients and the objects of this package stay as they are.
    """
    hooks = [hook for child in module.modules() for table in hook_tables(child).values() for hook in table.values()]
    with _undone(_Kept(trains=True), [type(module), *filter(is_of_others, hooks)]):
        yield


@contextmanager
def _undone(kept: _Kept, values: list[Any]) -> Iterator[None]:
    kept.visit([*values, *(hook for _, hook in global_hooks())])
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    with isolated_generators():
        try:
            yield
        finally:
            kept.restore()
            if on_device is not None:
                torch.cuda.set_rng_state(on_device)


class _Kept:
    """States of objects, as they were when they were visited.

    Args:
        trains: whether they belong to a model in training, whose gradients and objects of this package stay.
    """

    def __init__(self, *, trains: bool = False) -> None:
        self._trains = trains
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[Any, Any] = {}  # with the values, so that no other gets their ids
        self._bytes = 0

    def visit(self, values: list[Any]) -> None:
        """Keep the states of values, and of all that they lead to."""
        waiting = list(values)
        while waiting and len(self._seen) < _MOST_VALUES:
            value = waiting.pop()
            key = (id(value.owner), value.names) if isinstance(value, Named) else id(value)
            if key in self._seen or isinstance(value, (str, bytes, int, float, type(None))):
                continue
            if self._trains and not isinstance(value, Named) and home_of(type(value)).startswith("lightning_3d."):
                continue
            self._seen[key] = value
            with suppress(Exception):  # of properties and containers of the user's own
                self._keep(value)
                waiting += (part for _, part in parts_of(value))

    def restore(self) -> None:
        """Give everything its state back."""
        with torch.no_grad():
            for undo in reversed(self._undo):
                with suppress(Exception):
                    undo()

    def _keep(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, Named):
            self._keep_named(value)
        elif isinstance(value, CellType):
            self._keep_cell(value)
        elif isinstance(value, dict):
            before = {key: _copied(item) for key, item in dict.items(value)}
            self._undo.append(lambda: _refill_dict(value, before))
        elif isinstance(value, (list, deque, bytearray)):
            items = [_copied(item) for item in value]
            self._undo.append(lambda: _refill(value, items))
        elif isinstance(value, set):
            members = set(value)
            self._undo.append(lambda: _refill_set(value, members))
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: value.set_state(state))  # type: ignore[arg-type]
        elif isinstance(value, random.Random):
            drawn = value.getstate()
            self._undo.append(lambda: value.setstate(drawn))
        elif hasattr(type(value), "bit_generator"):  # of NumPy
            numbers = copy.deepcopy(value.bit_generator.state)
            self._undo.append(lambda: setattr(value.bit_generator, "state", numbers))
        elif isinstance(value, type):
            self._keep_class(value)
        elif not isinstance(value, ModuleType) and hasattr(value, "__dict__"):
            attributes = {key: _copied(item) for key, item in vars(value).items()}
            self._undo.append(lambda: _refill_dict(vars(value), attributes))

    def _keep_tensor(self, tensor: Tensor) -> None:
        if tensor.is_leaf and tensor.requires_grad and not self._trains:
            gradient = None if tensor.grad is None else tensor.grad.clone()
            self._undo.append(lambda: setattr(tensor, "grad", gradient))
        self._bytes += tensor.nbytes
        if isinstance(tensor, nn.Parameter) or tensor.is_meta or self._bytes > _MOST_BYTES:
            return
        values, version = tensor.detach().clone(), tensor._version

        def undo() -> None:
            if tensor._version != version:
                tensor.copy_(values)

        self._undo.append(undo)

    def _keep_named(self, named: Named) -> None:
        owner = named.owner if isinstance(named.owner, dict) else vars(named.owner)
        if isinstance(named.owner, ModuleType) and named.owner.__name__.partition(".")[0] in TRUSTED:
            return  # what libraries load late stays
        before = {name: _copied(owner[name]) for name in named.names if name in owner}

        def undo() -> None:
            for name in named.names:
                if name in before:
                    if owner.get(name, before) is not before[name]:
                        owner[name] = before[name]
                else:
                    owner.pop(name, None)

        self._undo.append(undo)

    def _keep_cell(self, cell: CellType) -> None:
        try:
            content = _copied(cell.cell_contents)
        except ValueError:  # empty
            return
        self._undo.append(lambda: setattr(cell, "cell_contents", content))

    def _keep_class(self, kind: type) -> None:
        if is_core(kind):
            return
        before = {key: value for key, value in vars(kind).items() if not key.startswith("__")}

        def undo() -> None:
            for key in [key for key in vars(kind) if not key.startswith("__")]:
                if key not in before:
                    delattr(kind, key)
            for key, value in before.items():
                if vars(kind).get(key) is not value:
                    setattr(kind, key, value)

        self._undo.append(undo)


def _copied(value: Any) -> Any:
    """Copy a counter, which has no state to set; everything else is the object itself."""
    return copy.copy(value) if isinstance(value, count) else value


def _refill_dict(into: dict[Any, Any], items: dict[Any, Any]) -> None:
    if len(into) == len(items) and all(key in items and items[key] is value for key, value in dict.items(into)):
        return
    dict.clear(into)
    dict.update(into, items)


def _refill_set(into: set[Any], members: set[Any]) -> None:
    into.clear()
    into.update(members)


def _refill(into: Any, items: list[Any]) -> None:
    into.clear()
    into.extend(items)
