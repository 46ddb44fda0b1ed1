"""Functions of PyTorch and Transformers that somebody replaced, and hooks that run in every module:
what versions do not show.

A function knows the module of code in which it was written, and its own name. So a replaced one is
found without reading files, except for names that libraries themselves give to functions of other
names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from lightning_3d.compat.torch import global_hooks
from lightning_3d.compat.transformers import registered_functions
from lightning_3d.models.reachable import CORE, home_of, is_of_others, is_trusted

_ALONE = ("torch", "torch.functional", "torch._tensor")
_BELOW = ("torch.nn.", "transformers.")


def replaced_functions() -> list[tuple[str, Any]]:
    """Find what was replaced or added: (place, function or class), in the modules of both libraries
    that are loaded.

    Takes about 10 ms. Functions of a library under another name than in its file count as replaced,
    too.
    """
    found: list[tuple[str, Any]] = []
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, ModuleType) and (name in _ALONE or name.startswith(_BELOW)):
            found += ((f"{name}.{key}", value) for key, value in _of_module(name, module))
    methods = (
        (key, value) for key, value in vars(torch.Tensor).items() if isinstance(value, FunctionType)
    )
    found += ((f"Tensor.{key}", value) for key, value in methods if not is_trusted(value))
    found += ((place, value) for place, value in registered_functions() if not is_trusted(value))
    return found + [(place, hook) for place, hook in global_hooks() if is_of_others(hook)]


def _of_module(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(module).items()):
        if isinstance(value, FunctionType):
            if (
                not is_trusted(value)
                and not _imports(module, value)
                or _is_another(module, key, value, value.__code__.co_name)
            ):
                yield key, value
        elif isinstance(value, BuiltinFunctionType):
            if _letters(value.__name__) != _letters(key) and not _is_alias(
                module, key, value.__name__
            ):
                yield key, value
        elif isinstance(value, type):
            if value.__module__ == name and name != "torch":
                yield from (
                    (f"{key}.{attribute}", function) for attribute, function in _of_class(value)
                )
            elif not is_trusted(value) and not _imports(module, value):
                yield key, value
        elif callable(value) and not is_trusted(
            value.func if isinstance(value, partial) else type(value)
        ):
            yield key, value


def _imports(module: ModuleType, value: Any) -> bool:
    """Return whether the file of a module of code names a package, such as one with optional
    kernels."""
    top = home_of(value).partition(".")[0]
    return bool(top) and re.search(rf"\b{re.escape(top)}\b", _source(module)) is not None


def _is_another(module: ModuleType, key: str, value: FunctionType, written: str) -> bool:
    """Return whether a function of a library stands in the place of another one."""
    home = home_of(value)
    if home.partition(".")[0] not in CORE or "<locals>" in value.__qualname__ or value.__closure__:
        return False
    if key not in (value.__name__, written):
        return not _is_alias(module, key, written)
    # Of the same name, from another file, although this file has its own.
    return home != module.__name__ and key in _defined(getattr(module, "__file__", None) or "")


def _letters(name: str) -> str:
    """Name without underscores: libraries call functions in C `_has_torch_function` and
    `has_torch_function`."""
    return name.replace("_", "")


def _is_alias(module: ModuleType, key: str, written: str) -> bool:
    """Return whether a file itself gives a function, `written` elsewhere, the name `key`, or fills
    the name when it is first used."""
    here, there = re.escape(key), re.escape(written)
    pattern = rf"\b{there} as {here}\b|^\s*{here}\s*(:.*)?=(.*\b{there}\b|\s*None$)|import {here}\b"
    return re.search(pattern, _source(module), re.MULTILINE) is not None


@lru_cache(maxsize=512)
def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@lru_cache(maxsize=512)
def _defined(path: str) -> frozenset[str]:
    return frozenset(re.findall(r"^def (\w+)", _text(path), re.MULTILINE))


def _source(module: ModuleType) -> str:
    return _text(getattr(module, "__file__", None) or "")


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    homes = {base.__module__ for base in kind.__mro__}
    names = {base.__qualname__ for base in kind.__mro__}
    for key, value in list(vars(kind).items()):
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not isinstance(function, FunctionType):
            continue
        owner = function.__qualname__.rpartition(".")[0]
        is_own = (
            "<locals>" in owner
            or not owner
            or (owner in names and (function.__closure__ or home_of(function) in homes))
        )
        if not is_trusted(function) or (home_of(function).partition(".")[0] in CORE and not is_own):
            yield key, function
