"""A description of the code that a module would run: two modules with the same one compute the same
from the same weights and inputs."""

from __future__ import annotations

import enum
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from lightning_3d.models.reachable import Named, Parts, home_of, is_core, parts_of

_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    PurePath,
    range,
    slice,
    type(Ellipsis),
    type(NotImplemented),
)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_NOT_COMPUTED_WITH = (GetSetDescriptorType, MemberDescriptorType, ReferenceType, torch.Generator)
_WITHOUT_NUMBERS = frozenset(
    {
        "lock",
        "RLock",
        "_RLock",
        "Lock",
        "Condition",
        "Event",
        "Logger",
        "RootLogger",
        "Random",
        "object",
        "_abc_data",
    }
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_MOST_BYTES = 2**26
_MOST_PARTS = 200_000


class Indescribable(Exception):
    """Something that a module computes with has no description, such as an object of a library in
    C."""


class CodeDescription:
    """Describes modules, functions and objects. What was described once is not described again.

    Args:
        root: the model; modules in it are described by their names where something refers to them.
    """

    def __init__(self, root: nn.Module) -> None:
        self._names = {id(child): name for name, child in root.named_modules()}
        self._known: dict[Any, tuple[Any, str]] = {}  # with the value, so that no other gets its id
        self._count = 0
        self.has_own_code = False
        """Whether a function, a class or an object was described that no library brings."""

    def plain_of(self, module: nn.Module) -> dict[str, Any]:
        """Attributes of a module that are numbers or strings, by name."""
        return {
            key: value
            for key, value in parts_of(module, whole=False)
            if isinstance(value, (str, int, float, bool))
        }

    def of_module(self, module: nn.Module) -> str:
        """Describe the class of a module, its objects, functions, hooks and buffers, but neither
        plain attributes nor the modules in it.

        Raises:
            Indescribable: see there.
        """
        parts = parts_of(module, whole=False)
        skipped = self.plain_of(module)
        filled = [
            (key, value)
            for key, value in parts
            if key not in skipped and not (isinstance(value, (Mapping, set)) and not value)
        ]
        return self._joined(self._of(type(module)), filled)

    def of(self, value: Any) -> str:
        """Describe anything.

        Raises:
            Indescribable: see there.
        """
        try:
            return self._of(value)
        except RecursionError:
            raise Indescribable("deeply nested") from None

    def _of(self, value: Any) -> str:
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if type(value) in _PLAIN or isinstance(value, (*_OF_TORCH, PurePath)):
            return repr(value)
        if isinstance(value, Tensor):
            return _of_tensor(value)
        key = (id(value.owner), value.names) if isinstance(value, Named) else id(value)
        if key not in self._known:
            self._known[key] = (value, f"inside {type(value).__name__}")  # a cycle ends here
            self._known[key] = (value, self._described(value))
        return self._known[key][1]

    def _described(self, value: Any) -> str:
        if id(value) in self._names:
            return f"module {self._names[id(value)]!r}"
        if isinstance(value, nn.Module):
            return str(
                [
                    (name, self.plain_of(child), self.of_module(child))
                    for name, child in value.named_modules()
                ]
            )
        if isinstance(value, ModuleType):
            return f"module of code {value.__name__}"
        if isinstance(value, re.Pattern):
            return repr(value)
        if isinstance(value, _NOT_COMPUTED_WITH) or type(value).__name__ in _WITHOUT_NUMBERS:
            return type(value).__name__
        parts = parts_of(value)
        if not _is_described_by_name(value) and all(part is type(value) for _, part in parts):
            raise Indescribable(type(value).__qualname__)
        return self._joined(self._heading(value), parts)

    def _heading(self, value: Any) -> str:
        if isinstance(value, (FunctionType, type)) and not is_core(value):
            self.has_own_code = True
            code = _of_code(value.__code__) if isinstance(value, FunctionType) else ""
            return f"{value.__qualname__} {code} {_of_file(home_of(value))}"
        if isinstance(value, (FunctionType, type)):
            return f"{home_of(value)}.{value.__qualname__}"
        if isinstance(value, BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}"
        return type(value).__qualname__

    def _joined(self, heading: str, parts: Parts) -> str:
        self._count += len(parts)
        if self._count > _MOST_PARTS:
            raise Indescribable(f"more than {_MOST_PARTS} objects")
        digest = hashlib.blake2b(heading.encode(errors="replace"), digest_size=16)
        for label, part in parts:
            digest.update(f"\n{label}: {self._of(part)}".encode(errors="replace"))
        return digest.hexdigest()


def code_and_sizes(module: nn.Module) -> str | None:
    """Describe a module and those in it: code, attributes that do not count blocks, and shapes.
    None where something has no description."""
    description = CodeDescription(module)
    parts: list[Any] = [
        (name, tuple(parameter.shape)) for name, parameter in module.named_parameters()
    ]
    try:
        for name, child in module.named_modules():
            plain = {
                key: value for key, value in description.plain_of(child).items() if "idx" not in key
            }
            parts.append((name, description.of_module(child), plain))
    except Indescribable:
        return None
    return str(parts)


def _is_described_by_name(value: Any) -> bool:
    """Return whether the heading of something without parts is all that it computes with."""
    if isinstance(
        value,
        (FunctionType, BuiltinFunctionType, type, Mapping, list, tuple, set, frozenset, Named),
    ):
        return True
    kind = type(value)
    if kind.__name__ in (
        "deque",
        "OpOverload",
        "OpOverloadPacket",
        "cell",
    ) or kind.__name__.endswith(("_descriptor", "method-wrapper")):
        return True
    # a class written in Python
    return "__slots__" in vars(kind) or (
        kind.__flags__ & _HEAP_TYPE != 0 and hasattr(value, "__dict__")
    )


def _of_tensor(tensor: Tensor) -> str:
    heading = f"{tuple(tensor.shape)} {tensor.dtype}"
    if isinstance(tensor, nn.Parameter) or tensor.is_meta:
        return heading
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.nbytes > _MOST_BYTES:
        raise Indescribable(f"a tensor {heading}")
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return (
        f"{heading}"
        f" {hashlib.blake2b(values.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()}"  # noqa: E501
    )


def _of_code(code: CodeType) -> str:
    """Describe compiled code, and that of the functions in it, without addresses in memory."""
    constants = [_of_constant(constant) for constant in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_flags} {constants}"


def _of_constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, tuple):
        return str([_of_constant(item) for item in value])
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _of_file(home: str) -> str:
    """Hash the file of a module of code, whose functions and constants its code may use by names
    that nothing shows."""
    file = getattr(sys.modules.get(home), "__file__", None)
    if file is not None:
        with suppress(OSError):
            return _hash_of_file(file, os.stat(file).st_mtime_ns)
    return ""


@lru_cache(maxsize=256)
def _hash_of_file(path: str, changed: int) -> str:
    """Hash a file. `changed` is its modification time, so that an edited file is read again."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
