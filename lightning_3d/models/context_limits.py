"""What a model's configuration says against context parallelism. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_3d.errors import ConfigError, PlanError

LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
ROPE_TYPES = ("dynamic", "longrope")
DROPOUTS = ("attention_dropout", "attn_pdrop")


def check_fields(name: str, read: Callable[[str], Any]) -> None:
    """Refuse a model for what the fields of its Transformers configuration say.

    Args:
        name: of the model, for the message. read: the value of a field by its name; None where there is none.

    Raises:
        PlanError: something in it looks at several tokens, beside attention that can be cut. ConfigError: an option of it.
    """
    kinds = set(read("layer_types") or ()) - LAYER_TYPES
    reason = ""
    if kinds:
        reason = f"it has layers of the kind {sorted(kinds)[0]}"
    elif read("attention_chunk_size"):
        reason = "it has chunked attention"
    elif rope := _rope_type(read):
        reason = f"its rotary positions (rope_type {rope}) depend on the length of the sequence"
    if reason:
        raise PlanError(f"Context parallelism (cp) cannot cut {name}: {reason}. Use cp 1.")
    if dropout := next((value for key in DROPOUTS if (value := read(key))), 0.0):
        raise ConfigError(f"{name} has attention_dropout={dropout}, which context parallelism (cp) does not have. Set it to 0.")
    if read("output_attentions"):
        raise ConfigError(f"{name} returns attention weights (output_attentions), which context parallelism (cp) has not. Turn it off.")


def _rope_type(read: Callable[[str], Any]) -> str | None:
    """The first of `ROPE_TYPES` that a model has."""
    for found in (read("rope_parameters"), read("rope_scaling")):
        if isinstance(found, dict):
            for values in (found, *(value for value in found.values() if isinstance(value, dict))):
                kind = values.get("rope_type", values.get("type"))
                if kind in ROPE_TYPES:
                    return str(kind)
    return None
