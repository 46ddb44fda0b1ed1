"""Copies of modules for trials: hooks and replaced functions of a copy work on the copied modules,
and on copies of what they remember."""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from lightning_3d.models.reachable import hook_tables, is_of_lightning

Known = dict[int, Any]
"""The memo of `copy.deepcopy`: id of an object -> its copy."""


def deep_copy(module: nn.Module, memo: Known | None = None) -> Any:
    """Copy `module` deeply; attributes that cannot be copied (locks, open files, results of
    computations) are shared with the copy.

    Modules outside of `module` that hooks refer to, such as the LightningModule, are shared as
    well.
    """
    hooks = {
        id(table): (table, type(table)())
        for child in module.modules()
        for table in hook_tables(child).values()
    }
    given = (memo or {}) | {key: empty for key, (_, empty) in hooks.items()}
    known = dict(given)
    try:
        copied = copy.deepcopy(module, known)
    except Exception:
        known = given | _without_copies(module, given)
        copied = copy.deepcopy(module, known)
    for table, empty in hooks.values():
        empty |= {key: _copy_of_code(hook, known) for key, hook in table.items()}
    for old, new in zip(module.modules(), copied.modules(), strict=True):
        for key, value in vars(old).items():
            if isinstance(value, FunctionType) and value.__closure__:
                vars(new)[key] = _copy_of_code(value, known)
    return copied


def _copy_of_code(value: Any, known: Known) -> Any:
    """Copy a hook, or what a function refers to. `copy.deepcopy` does not copy functions."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType) and value.__closure__:
        return _copy_of_function(value, known)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy_of_code(value.__self__, known))
    if isinstance(value, functools.partial):
        named = {key: _copy_of_code(item, known) for key, item in value.keywords.items()}
        return functools.partial(
            _copy_of_code(value.func, known),
            *(_copy_of_code(item, known) for item in value.args),
            **named,
        )
    if isinstance(value, nn.Module) or is_of_lightning(value):  # outside of what is copied
        return value
    try:
        return copy.deepcopy(value, known)
    except Exception:
        return value


def _copy_of_function(function: FunctionType, known: Known) -> FunctionType:
    cells = [known.setdefault(id(cell), CellType()) for cell in function.__closure__ or ()]
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    known[id(function)] = copied
    vars(copied).update(vars(function))
    for old, new in zip(function.__closure__ or (), cells, strict=True):
        try:
            content = old.cell_contents
        except ValueError:  # empty
            continue
        new.cell_contents = _copy_of_code(content, known)
    return copied


def _without_copies(module: nn.Module, memo: Known) -> Known:
    """Find the attributes that cannot be copied, by id."""
    scratch: Known = {
        id(value): value for value in (*module.parameters(), *module.buffers(), *module.modules())
    }
    scratch |= memo
    found: Known = {}
    for child in module.modules():
        for key, value in vars(child).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, scratch)
            except Exception:
                found[id(value)] = value
    return found
