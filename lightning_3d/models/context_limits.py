"""Fields of a model's configuration that rule out context parallelism. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_3d.errors import ConfigError, PlanError

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
ROPE_TYPES = ("dynamic", "longrope")
DROPOUTS = ("attention_dropout", "attn_pdrop")


def check_fields(name: str, read: Callable[[str], Any]) -> None:
    """Refuse a model whose Transformers configuration rules out context parallelism.

    Args:
        name: name of the model in the message.
        read: function from the name of a field to its value, or None.

    Raises:
        PlanError: a part of the model, other than attention that can be split, reads several tokens.
        ConfigError: an option that context parallelism does not support.
    """
    kinds = set(read("layer_types") or ()) - LAYER_TYPES
    reason = ""
    if kinds:
        reason = f"it has {sorted(kinds)[0]} layers"
    elif read("attention_chunk_size"):
        reason = "it has chunked attention"
    elif rope := _rope_type(read):
        reason = f"its rotary positions (rope_type {rope}) depend on the length of the sequence"
    if reason:
        raise PlanError(f"Context parallelism (cp) cannot split the sequences of {name}: {reason}. Use cp=1.")
    if dropout := next((value for key in DROPOUTS if (value := read(key))), 0.0):
        raise ConfigError(f"{name} has attention_dropout={dropout}, which context parallelism (cp) does not support. Set it to 0.")
    if read("output_attentions"):
        raise ConfigError(
            f"{name} returns attention weights, which context parallelism (cp) does not compute. Set output_attentions=False."
        )


def _rope_type(read: Callable[[str], Any]) -> str | None:
    """Return the first of `ROPE_TYPES` that a model has."""
    for found in (read("rope_parameters"), read("rope_scaling")):
        if isinstance(found, dict):
            for values in (found, *(value for value in found.values() if isinstance(value, dict))):
                kind = values.get("rope_type", values.get("type"))
                if kind in ROPE_TYPES:
                    return str(kind)
    return None
