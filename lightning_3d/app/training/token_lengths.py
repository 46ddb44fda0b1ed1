"""Lengths in tokens that a model is configured with: windows, chunks and blocks of attention,
compression rates, selections of tokens.

A row of few tokens does not show the edge of a longer window. `shorten` makes a model whose edges
lie within the row.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn

_LENGTH = re.compile(
    r"(?!num_|n_|max_|mask_)(.*_)?("
    # sliding_window, index_block_size, ...
    r"(window|chunk|span|stride)s?|(window|chunk|block|span|segment)_(size|len|length)s?"
    r"|compress(ion)?_(rate|ratio|factor)s?(_[a-z]+)?"  # of tokens into one key
    # the window of ModernBERT, and selections of tokens or blocks
    r"|local_attention|index_topk(_blocks)?|indexer_budget)"
)
"""Names, whole, of lengths in tokens. Numbers of windows, and the period of layers with a window
(`sliding_window_pattern`), are none."""


def is_length(name: str) -> bool:
    """Return whether a field of a configuration, or an attribute of a module, is by its name a
    length in tokens."""
    return _LENGTH.fullmatch(name) is not None


def shorten(model: nn.Module, length: int) -> None:
    """Make every length in tokens of a model, of its configurations and of its modules, at most
    `length`, in place.

    Parameters and attributes that follow from a length, such as a weight for each token of a
    compressed block, get the shapes and values with which a model of the shorter configuration is
    built.

    Args:
        model: a model of Transformers with parameters on meta: they have no values.
        length: tokens.
    """
    owners = [
        config for child in model.modules() if (config := vars(child).get("config")) is not None
    ]
    changed = [
        _shorten_fields(owner, length) for owner in {id(owner): owner for owner in owners}.values()
    ]
    if any(changed) and (shorter := _built_again(model)) is not None:
        _follow(model, shorter)
    for child in model.modules():
        if not type(child).__module__.startswith("torch."):
            _shorten_fields(child, length)


def _shorten_fields(holder: Any, length: int) -> bool:
    """Return whether a length of a configuration or of a module was longer."""
    found = {
        name: _shortened(value, length) for name, value in vars(holder).items() if is_length(name)
    }
    changed = {name: value for name, value in found.items() if value != vars(holder)[name]}
    vars(holder).update(changed)  # a configuration would check each field before the next follows
    return bool(changed)


def _shortened(value: Any, length: int) -> Any:
    """The value of a field: a number of tokens, or numbers by kind of layer, by layer."""
    if isinstance(value, dict):
        return {key: _shortened(item, length) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shortened(item, length) for item in value)
    return min(value, length) if isinstance(value, int) and not isinstance(value, bool) else value


def _built_again(model: Any) -> nn.Module | None:
    """Build a model of the same configuration on meta; None where its class needs more than
    that."""
    try:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"  # the kernels of others may not be installed here
        with torch.device("meta"):
            built: nn.Module = type(model)(config)
    except Exception:
        return None
    return built


def _follow(model: nn.Module, built: nn.Module) -> None:
    """Give parameters, on meta, the shapes, and whole-number attributes the values, that they have
    in another model of the same class."""
    others = dict(built.named_modules())
    tied: dict[int, nn.Parameter] = {}
    for name, child in model.named_modules():
        other = others.get(name)
        if other is None or not isinstance(child, type(other)):
            continue
        for key, value in vars(child).items():
            if type(value) is int and type(new := vars(other).get(key)) is int:
                setattr(child, key, new)
        for key, parameter in child._parameters.items():
            blank = other._parameters.get(key)
            if parameter is not None and blank is not None and parameter.shape != blank.shape:
                fitting = nn.Parameter(parameter.new_empty(blank.shape), parameter.requires_grad)
                child._parameters[key] = tied.setdefault(id(parameter), fitting)
