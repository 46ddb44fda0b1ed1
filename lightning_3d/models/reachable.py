"""What the code of a model can reach: functions with their closures, defaults and globals, classes,
objects and containers.

Two things walk along it: the description under which a self-check is remembered
(`code_description`), and the state that a trial restores (`parallel.undone`). Libraries end the
walk: their version describes them, and `library_patches` finds what somebody replaced in them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

CORE = frozenset({"torch", "transformers", "lightning", "lightning_3d"})
"""Packages whose version is part of what is remembered."""

_USED_BY_CORE = frozenset(
    {
        "accelerate",
        "huggingface_hub",
        "safetensors",
        "tokenizers",
        "numpy",
        "PIL",
        "typing_extensions",
    }
)
TRUSTED = CORE | _USED_BY_CORE | sys.stdlib_module_names
"""Packages that libraries themselves use."""

_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})
_NOT_STATE = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__firstlineno__",
        "_abc_impl",
    }
)
_NOT_COMPUTED_WITH = frozenset(
    {
        "_parameters",
        "_modules",
        "training",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
    }
    | {"_load_state_dict_post_hooks", "_non_persistent_buffers_set"}
)

Parts = list[tuple[str, Any]]


@dataclass(frozen=True)
class Named:
    """Those attributes of a module of code, of its globals or of a large object that a function
    names, of which it may use no other.

    Attributes:
        owner: a dictionary of globals, a module of code, or a LightningModule or Trainer.
        names: all names in the code of the function.
    """

    owner: Any
    names: frozenset[str]

    @property
    def present(self) -> dict[str, Any]:
        """Attributes that exist, without computing properties."""
        found = _state_of(self.owner)
        if isinstance(self.owner, nn.Module):
            found |= self.owner._modules | self.owner._parameters
        return {name: found[name] for name in sorted(self.names) if name in found}

    def parts(self) -> Parts:
        """Attributes, and the methods among the names, each with what it names itself."""
        found = [(name, limited(value, self.names)) for name, value in self.present.items()]
        if not isinstance(self.owner, (dict, ModuleType)):
            methods = {name: getattr(type(self.owner), name, None) for name in sorted(self.names)}
            own = {
                name: method
                for name, method in methods.items()
                if isinstance(method, FunctionType) and not is_core(method)
            }
            found += own.items()
            found += [
                (f"self of {name}", Named(self.owner, names_of(method.__code__)))
                for name, method in own.items()
            ]
        return found


def limited(value: Any, names: frozenset[str]) -> Any:
    """Limit a value that leads to everything (a module of code, a LightningModule, a Trainer) to
    the attributes that a function names."""
    return Named(value, names) if isinstance(value, ModuleType) or is_of_lightning(value) else value


def is_of_lightning(value: Any) -> bool:
    """Return whether an object is a LightningModule, a Trainer, a callback or the like, which lead
    to everything."""
    return any(kind.__module__.partition(".")[0] in _LIGHTNING for kind in type(value).__mro__)


def _state_of(owner: Any) -> dict[str, Any]:
    return owner if isinstance(owner, dict) else dict(getattr(owner, "__dict__", {}))


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> frozenset[str]:
    """All names of globals and attributes in compiled code, and in the functions in it."""
    inside = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inside)


def home_of(value: Any) -> str:
    """Name of the module of code in which a function or class was written, whatever
    `functools.wraps` says."""
    scope = getattr(value, "__globals__", None)
    name = (
        scope.get("__name__", "") if isinstance(scope, dict) else getattr(value, "__module__", "")
    )
    return name if isinstance(name, str) else ""


def is_core(value: Any) -> bool:
    """Return whether a function or class belongs to a library whose version is remembered, or to
    Python."""
    top = home_of(value).partition(".")[0]
    return top in CORE or top in sys.stdlib_module_names or top.startswith("namedtuple_")


def is_trusted(value: Any) -> bool:
    """Return whether a function or class belongs to a package that libraries themselves use."""
    return is_core(value) or home_of(value).partition(".")[0] in TRUSTED


def parts_of(value: Any, *, whole: bool = True) -> Parts:
    """List what a value leads to, each with a label.

    Args:
        value: anything.
        whole: whether a module leads to its parameters and to the modules in it.
    """
    if isinstance(value, Named):
        return value.parts()
    if isinstance(value, nn.Module):
        found = [
            (key, part)
            for key, part in vars(value).items()
            if (whole or key not in _NOT_COMPUTED_WITH) and part is not None
        ]
        return [("class", type(value)), *found] if whole else found
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, MethodType):
        code = getattr(value.__func__, "__code__", None)
        return [
            ("function", value.__func__),
            ("self", value.__self__ if code is None else limited(value.__self__, names_of(code))),
        ]
    if isinstance(value, functools.partial):
        return [("function", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, (staticmethod, classmethod)):
        return [("function", value.__func__)]
    if isinstance(value, property):
        return [("get", value.fget), ("set", value.fset)]
    if isinstance(value, BuiltinFunctionType):
        return (
            []
            if isinstance(value.__self__, (ModuleType, type, type(None)))
            else [("self", value.__self__)]
        )
    if isinstance(value, type):
        return [] if is_core(value) else _parts_of_class(value)
    if isinstance(value, CellType):
        return [("content", content) for content in _content(value)]
    if isinstance(value, Mapping):
        items = dict.items(value) if isinstance(value, dict) else value.items()
        return [("key", key) for key in value] + [
            (str(place), item) for place, (_, item) in enumerate(items)
        ]
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return [(str(place), item) for place, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [("item", item) for item in sorted(value, key=repr)]
    if isinstance(value, (Tensor, ModuleType, str, bytes, int, float)) or is_of_lightning(value):
        return []
    return [("class", type(value)), *_attributes(value)]


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # empty
        return []


def _parts_of_function(function: FunctionType) -> Parts:
    names = names_of(function.__code__)
    found: Parts = list(vars(function).items())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found.append((f"cell {name}", cell))
        found += [
            (f"part of {name}", limited(content, names))
            for content in _content(cell)
            if is_of_lightning(content)
        ]
    if is_core(function):
        return found
    found += [("defaults", function.__defaults__), ("named defaults", function.__kwdefaults__)]
    return [*found, ("globals", Named(function.__globals__, names))]


def _parts_of_class(kind: type) -> Parts:
    own = [(key, value) for key, value in vars(kind).items() if key not in _NOT_STATE]
    return [*(("base", base) for base in kind.__bases__), *own]


def _attributes(value: Any) -> Parts:
    """Attributes of an object, in `__dict__` or slots."""
    slots: Iterable[str] = (name for kind in type(value).__mro__ for name in _slots(kind))
    found = [
        (name, getattr(value, name))
        for name in slots
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    ]
    return [*found, *getattr(value, "__dict__", {}).items()]


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def hook_tables(module: nn.Module) -> dict[str, dict[int, Any]]:
    """Hooks of one module that run in a step, by the attribute that has them."""
    return {
        key: value
        for key, value in vars(module).items()
        if key.startswith(("_forward", "_backward")) and key.endswith("_hooks")
    }


def is_of_others(hook: Any) -> bool:
    """Return whether anybody except this package wrote a hook."""
    return home_of(getattr(hook, "__func__", hook)).partition(".")[0] != "lightning_3d"
