"""Fields of a model's configuration that limit context parallelism. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_3d.errors import ConfigError

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
WITHOUT_ATTENTION = {"linear_attention", "conv", "mamba", "hybrid"}
"""Layer types that mix tokens by other means, in addition to attention of `LAYER_TYPES` in the case
of hybrid ones."""
ROPE_TYPES = ("dynamic", "longrope")
DROPOUTS = ("attention_dropout", "attn_pdrop")


def check_fields(name: str, read: Callable[[str], Any]) -> None:
    """Refuse options of a Transformers configuration that context parallelism does not support.

    Args:
        name: name of the model in the message.
        read: function from the name of a field to its value, or None.

    Raises:
        ConfigError: an option that context parallelism does not support.
    """
    if dropout := next((value for key in DROPOUTS if (value := read(key))), 0.0):
        raise ConfigError(
            f"{name} has attention_dropout={dropout}, which context parallelism (cp) does not"
            " support. Set it to 0."
        )
    if read("output_attentions"):
        raise ConfigError(
            f"{name} returns attention weights, which context parallelism (cp) does not compute."
            " Set output_attentions=False."
        )


def why_not_by_attention(read: Callable[[str], Any]) -> str:
    """Say why ranks cannot share the sequences of a model by its attention alone; empty if its
    configuration does not show that.

    Args:
        read: function from the name of a field to its value, or None.
    """
    kinds = set(read("layer_types") or ()) - LAYER_TYPES
    if kinds:
        return f"it has {min(kinds)} layers"
    if read("attention_chunk_size"):
        return "it has chunked attention"
    if rope := rope_type(read):
        return f"its rotary positions (rope_type {rope}) depend on the length of the sequence"
    return ""


def attends_plainly(read: Callable[[str], Any]) -> bool:
    """Return whether all attention of a model is that of `LAYER_TYPES`, next to layers that have
    none."""
    return set(read("layer_types") or ()) <= LAYER_TYPES | WITHOUT_ATTENTION and not read(
        "attention_chunk_size"
    )


def rope_type(read: Callable[[str], Any]) -> str | None:
    """Return the first of `ROPE_TYPES` that a model has."""
    for found in (read("rope_parameters"), read("rope_scaling")):
        if isinstance(found, dict):
            for values in (found, *(value for value in found.values() if isinstance(value, dict))):
                kind = values.get("rope_type", values.get("type"))
                if kind in ROPE_TYPES:
                    return str(kind)
    return None
