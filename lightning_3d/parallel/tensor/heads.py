"""Attention heads: how many a module has, by its configuration or its own attributes, and how many
one rank has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_3d.compat.peft_layers import base_layer
from lightning_3d.models.parallel_plan import COLUMN_STYLES, Cut

_KEY_OR_VALUE = re.compile(
    r"(w|to_)?[kv](_proj|_lin|_linear|_norm|_layernorm)?|(key|value)s?(_proj|_projection|_norm|_layernorm)?"
)
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


@dataclass(frozen=True)
class Heads:
    """Query heads and key/value heads of one attention module; `keys` divides `queries`."""

    queries: int
    keys: int

    def on_one_rank(self, tp_size: int) -> Heads:
        """Return the heads on one rank. If there are fewer key heads than ranks, they are
        replicated, so that each rank has one."""
        return Heads(self.queries // tp_size, max(self.keys // tp_size, 1))


def is_key_or_value(name: str) -> bool:
    """Return whether the name of a layer (or of its parameter) says that it computes keys or
    values, which may have fewer heads than ranks."""
    layer = name.removesuffix(".weight").removesuffix(".bias")
    return _KEY_OR_VALUE.fullmatch(layer.rpartition(".")[2]) is not None


def heads_of(module: nn.Module, parent_name: str, cuts: Mapping[str, Cut]) -> Heads | None:
    """Heads of an attention module; None when it is not one.

    Args:
        cuts: the layers directly in it that the plan shards, by full name.
    """
    parent = module.get_submodule(parent_name)
    queries = _query_heads(parent, parent_name)
    if queries is None:
        return None
    rows = {
        name: layer.out_features
        for name, cut in cuts.items()
        if cut.style in COLUMN_STYLES
        and isinstance(layer := base_layer(_layer(module, name)), nn.Linear)
    }
    sizes = [
        value
        for name in ("head_dim", "head_size")
        if isinstance(value := getattr(parent, name, None), int)
    ]
    sizes += [
        size // queries
        for name, size in rows.items()
        if not is_key_or_value(name) and size % queries == 0
    ]
    # Some families have other numbers of key heads in some layers: the layer's size takes
    # precedence over the configuration.
    for name, size in rows.items():
        if (
            is_key_or_value(name)
            and sizes
            and size % sizes[0] == 0
            and queries % (size // sizes[0]) == 0
        ):
            return Heads(queries, size // sizes[0])
    return Heads(queries, _declared_keys(parent) or queries)


def belongs_to_transformers(module: nn.Module) -> bool:
    """True if the class, or one that it derives from, is Transformers' own: the names of its
    attributes are known."""
    return any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__)


def local_attributes(parent: nn.Module, heads: Heads, tp_size: int) -> dict[str, int]:
    """Attributes of an attention module that count heads, by their names -> their values on a rank,
    which has only its own heads.

    Names are known in Transformers. In other modules they are a first guess, which
    `self_check.local_sizes` tries.
    """
    local = heads.on_one_rank(tp_size)
    found: dict[str, int] = {}
    for name, value in vars(parent).items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if "group" in name and value == heads.queries // heads.keys:
            found[name] = local.queries // local.keys
        elif _counts_heads(name) and value == (
            heads.keys if _is_about_keys(name) else heads.queries
        ):
            found[name] = local.keys if _is_about_keys(name) else local.queries
    return found


def divisible_numbers(module: nn.Module, tp_size: int) -> dict[str, int]:
    """Integer attributes of a module that could be split over ranks, such as heads -> one rank's
    part."""
    found: dict[str, int] = {}
    for name, value in vars(module).items():
        is_number = (
            name[0] != "_" and isinstance(value, int) and not isinstance(value, bool) and value > 1
        )
        if is_number and (value % tp_size == 0 or tp_size % value == 0):
            found[name] = max(value // tp_size, 1)
    return found


def _layer(module: nn.Module, name: str) -> object:
    parent, _, last = name.rpartition(".")
    return getattr(module.get_submodule(parent), last)


def _counts_heads(name: str) -> bool:
    return name.lower().removesuffix("s").endswith("head")


def _is_about_keys(name: str) -> bool:
    return "kv" in name or "key" in name


def _query_heads(parent: nn.Module, parent_name: str) -> int | None:
    """Number of query heads: the configuration's for a module that is called an attention, else the
    module's own."""
    is_attention = (
        "attention" in type(parent).__name__.lower()
        or "att" in parent_name.rpartition(".")[2].lower()
    )
    declared = getattr(getattr(parent, "config", None), "num_attention_heads", None)
    if is_attention and isinstance(declared, int):
        return declared
    counts = [
        value
        for name, value in vars(parent).items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and _counts_heads(name)
        and not _is_about_keys(name)
    ]
    return max(counts) if counts else None


def _declared_keys(parent: nn.Module) -> int | None:
    for owner in (parent, getattr(parent, "config", None)):
        for name in _KEY_COUNTS:
            if isinstance(value := getattr(owner, name, None), int):
                return value
    return None
