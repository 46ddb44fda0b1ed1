"""Combinations of model, plan, layout and versions that have been checked: those shipped with the
package, and those of this user."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from lightning_3d.engine.self_check.model_copy import described, kinds_of
from lightning_3d.errors import PlanError
from lightning_3d.layout.layout import Layout
from lightning_3d.models.code_description import CodeDescription, Indescribable
from lightning_3d.models.library_patches import replaced_functions
from lightning_3d.models.parallel_plan import Cut, ParallelPlan, read_plan
from lightning_3d.models.reachable import hook_tables, is_of_others
from lightning_3d.storage.user_cache import default_cache

VERIFIED = Path(__file__).with_name("verified.json")
"""Families of Transformers that were compared with one process: {versions: {family: axes}}, see
`tools/family_matrix.py`."""

_AXES = ("tp", "pp", "cp", "ep")


def versions() -> str:
    """Versions of the libraries that decide what a model computes and how it is rewritten."""
    parts = []
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            parts.append(f"{name} {version(name).split('+')[0]}")
    return ", ".join(parts)


def family_of(module: nn.Module) -> str:
    """Hash the classes in a model and the plan that it declares, but not its sizes and number of
    layers."""
    kinds = sorted(
        {f"{type(child).__module__}.{type(child).__qualname__}" for child in module.modules()}
    )
    try:
        plan = _plan(read_plan(module))
    except PlanError:
        plan = []
    return _hash([type(module).__qualname__, kinds, re.sub(r"\.\d+\b", ".*", json.dumps(plan))])


def is_verified(module: nn.Module, layout: Layout) -> bool:
    """Return whether the family was compared with one process along each axis of the layout, with
    these versions and its own plan.

    A model with a hook, a replaced function or an object of somebody's own is not what was
    compared.
    """
    axes = _verified().get(versions(), {}).get(family_of(module), ())
    return all(axis in axes for axis in _AXES if getattr(layout, axis) > 1) and not has_own_code(
        module
    )


def has_own_code(module: nn.Module) -> bool:
    """Return whether a model runs code that its libraries do not bring, hooks, or something of
    which nothing is known."""
    if any(
        is_of_others(hook)
        for child in module.modules()
        for table in hook_tables(child).values()
        for hook in table.values()
    ):
        return True
    description = CodeDescription(module)
    try:
        for child in module.modules():
            description.of_module(child)
    except Indescribable:
        return True
    return description.has_own_code or bool(replaced_functions())


@lru_cache(maxsize=1)
def _verified() -> dict[str, dict[str, list[str]]]:
    return json.loads(VERIFIED.read_text())


def identity(module: nn.Module, plan: ParallelPlan, layout: Layout, more: Any) -> str | None:
    """Hash everything on which the result of a check depends: code and what it reads, sizes, plan,
    layout, versions and `more`.

    Returns:
        The hash; None where something that the model computes with cannot be described, so that
        nothing can be remembered.
    """
    blocks = list(module.get_submodule(plan.layers).children()) if plan.layers else []
    description = CodeDescription(module)
    try:
        inside = f"{plan.layers}." if plan.layers else "\0"
        rest = {
            key: text
            for key, text in described(module, description).items()
            if not key.startswith(inside)
        }
        firsts = [described(blocks[kind[0]], description) for kind in kinds_of(blocks, description)]
        replaced = sorted(
            f"{place} {description.of(value)}" for place, value in replaced_functions()
        )
    except Indescribable:
        return None
    return _hash(
        [rest, firsts, replaced, _plan(plan), str(layout), versions(), more, _own_version()]
    )


def _plan(plan: ParallelPlan) -> list[Any]:
    entries = [
        sorted((name, _cut(cut)) for name, cut in part.items()) for part in (plan.tp, plan.ep)
    ]
    # the hashes in `VERIFIED` are older
    travels = [plan.carried, plan.sides] if plan.carried or plan.sides else []
    return [*entries, plan.layers, plan.before, plan.after, plan.embedding, plan.head, *travels]


def _cut(cut: Cut) -> str:
    """Describe a shard style. The hashes in `VERIFIED` contain this text, so a field that is added
    must not change it where unused."""
    shared = ", shared=True" if cut.shared else ""
    return f"Cut(style={cut.style!r}, units={cut.units!r}, parts={cut.parts!r}{shared})"


def _own_version() -> str:
    from lightning_3d.version import __version__

    return __version__


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Folder of remembered results."""
    return default_cache() / "self_check"


@dataclass(frozen=True)
class Findings:
    """What a check that has passed has found.

    Attributes:
        sizes: local sizes.
        partial: what a forward leaves for the step, and ranks have a part of; as `find_partial`
            lists it.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    partial: tuple[tuple[str, ...], ...] = ()


def recall(key: str | None) -> Findings | None:
    """Read what a check found; None where it has not passed yet, or its file cannot be read."""
    if key is None:
        return None
    try:
        found = json.loads((cache_folder() / f"{key}.json").read_text())
        sizes, partial = (
            found["local_sizes"],
            tuple(tuple(map(str, place)) for place in found["partial"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    whole_numbers = isinstance(sizes, dict) and all(
        isinstance(value, int) for value in sizes.values()
    )
    return Findings(sizes, partial) if whole_numbers else None


def remember(key: str | None, findings: Findings, model: str) -> None:
    """Write that a check has passed. Where nothing can be written, or there is no key, the check
    runs again next time."""
    if key is None:
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = {"local_sizes": findings.sizes, "partial": findings.partial}
        content = {
            "model": model,
            "versions": versions(),
            "python": sys.version.split()[0],
            **found,
        }
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".new") as file:
            json.dump(content, file)
        os.replace(file.name, folder / f"{key}.json")
    except OSError:
        return
