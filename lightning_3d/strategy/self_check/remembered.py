"""Combinations of model, plan, layout and versions that have been checked: those shipped with the package, and those of this user."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType
from typing import Any

from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.parallel_plan import Cut, ParallelPlan, read_plan
from lightning_3d.strategy.self_check.model_copy import described, kinds_of

VERIFIED = Path(__file__).with_name("verified.json")
"""Families of Transformers that were compared with one process: {versions: {family: axes}}, see `tools/family_matrix.py`."""

_AXES = ("tp", "pp", "cp", "ep")


def versions() -> str:
    """Versions of the libraries that decide what a model computes and how it is rewritten."""
    parts = []
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name).split('+')[0]}")
    return ", ".join(parts)


def family_of(module: nn.Module) -> str:
    """Hash the classes in a model and the plan that it declares, but not its sizes and number of layers."""
    kinds = sorted({f"{type(child).__module__}.{type(child).__qualname__}" for child in module.modules()} | _patches(module))
    try:
        plan = _plan(read_plan(module))
    except PlanError:
        plan = []
    return _hash([type(module).__qualname__, kinds, re.sub(r"\.\d+\b", ".*", json.dumps(plan))])


def is_verified(module: nn.Module, layout: Layout) -> bool:
    """Return whether the family was compared with one process along each axis of the layout, with these versions and its own plan."""
    axes = _verified().get(versions(), {}).get(family_of(module), ())
    return all(axis in axes for axis in _AXES if getattr(layout, axis) > 1)


@lru_cache(maxsize=1)
def _verified() -> dict[str, dict[str, list[str]]]:
    return json.loads(VERIFIED.read_text())


def identity(module: nn.Module, plan: ParallelPlan, layout: Layout, more: Any) -> str:
    """Hash everything on which the result of a check depends: source of the classes, sizes, plan, layout, versions and `more`."""
    blocks = list(module.get_submodule(plan.layers).children()) if plan.layers else []
    rest = {key: value for key, value in described(module).items() if not plan.layers or not key.startswith(f"{plan.layers}.")}
    firsts = [(kind[0], described(blocks[kind[0]])) for kind in kinds_of(blocks)]
    source = sorted({_source(kind) for child in module.modules() for kind in type(child).__mro__})
    objects = sorted({_text_of(value) for child in module.modules() for key, value in vars(child).items() if key[0] != "_"})
    return _hash([source + sorted(_patches(module)), rest, firsts, objects, _plan(plan), str(layout), versions(), more, _own_version()])


def _patches(module: nn.Module) -> set[str]:
    """Describe the functions that replace `forward` on single instances."""
    return {_code(vars(child)["forward"]) for child in module.modules() if "forward" in vars(child)}


_SIMPLE = (str, int, float, bool, type(None))


def _text_of(value: Any, depth: int = 3) -> str:
    """Describe the plain values in an attribute that is an object, such as a configuration. (`described` has those of modules.)"""
    if isinstance(value, _SIMPLE):
        return repr(value) if depth < 3 else ""
    if isinstance(value, (nn.Module, Tensor)) or depth == 0:
        return type(value).__name__
    if isinstance(value, Mapping):
        return str(sorted((str(key), _text_of(item, depth - 1)) for key, item in value.items()))
    if isinstance(value, (list, tuple, set, frozenset)):
        return str([_text_of(item, depth - 1) for item in value])
    return f"{type(value).__qualname__} {_text_of(getattr(value, '__dict__', {}), depth - 1) if not callable(value) else ''}"


def _plan(plan: ParallelPlan) -> list[Any]:
    entries = [sorted((name, _cut(cut)) for name, cut in part.items()) for part in (plan.tp, plan.ep)]
    travels = [plan.carried, plan.sides] if plan.carried or plan.sides else []  # the hashes in `VERIFIED` are older
    return [*entries, plan.layers, plan.before, plan.after, plan.embedding, plan.head, *travels]


def _cut(cut: Cut) -> str:
    """Describe a shard style. The hashes in `VERIFIED` contain this text, so a field that is added must not change it where unused."""
    shared = ", shared=True" if cut.shared else ""
    return f"Cut(style={cut.style!r}, units={cut.units!r}, parts={cut.parts!r}{shared})"


def _source(kind: type) -> str:
    """Describe the code of a class: its file, whose functions and constants it may use. For libraries the version is enough."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind.__module__.partition(".")[0] in ("torch", "transformers", "lightning", "lightning_3d", "builtins", "abc", "typing"):
        return name
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is not None:
        with suppress(OSError):
            return f"{name} {_hash_of_file(file, os.stat(file).st_mtime_ns)}"
    return f"{name} {[_code(value) for _, value in sorted(vars(kind).items())]}"  # a class of a notebook, for example


@lru_cache(maxsize=256)
def _hash_of_file(path: str, changed: int) -> str:
    """Hash a file. `changed` is its modification time, so that an edited file is read again."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _code(value: Any) -> str:
    """Describe the compiled code of a function, and of the functions in it, without addresses in memory."""
    if isinstance(value, CodeType):
        return f"{value.co_code.hex()} {value.co_names} {[_code(constant) for constant in value.co_consts]}"
    if isinstance(value, (*_SIMPLE, bytes)):
        return repr(value)
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return _code(code) if code is not None else type(value).__name__


def _own_version() -> str:
    from lightning_3d.version import __version__

    return __version__


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Folder of remembered results: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_3d" / "self_check"


def recall(key: str) -> dict[str, int] | None:
    """Read the local sizes that a check found; None where it has not passed yet, or its file cannot be read."""
    try:
        found = json.loads((cache_folder() / f"{key}.json").read_text())
        sizes = found["local_sizes"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sizes if isinstance(sizes, dict) and all(isinstance(value, int) for value in sizes.values()) else None


def remember(key: str, local_sizes: dict[str, int], model: str) -> None:
    """Write that a check has passed. Where nothing can be written, the check runs again next time."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"model": model, "versions": versions(), "python": sys.version.split()[0], "local_sizes": local_sizes}
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".new") as file:
            json.dump(content, file)
        os.replace(file.name, folder / f"{key}.json")
    except OSError:
        return
