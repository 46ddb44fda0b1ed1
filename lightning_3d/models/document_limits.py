"""Models and options that cannot keep the documents of a packed sample apart, as their
configuration shows. Pure: no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_3d.errors import ConfigError, listed
from lightning_3d.models.context_limits import WITHOUT_ATTENTION, rope_type

MASKED = ("sdpa", "eager", "flex_attention")
"""Implementations of attention that take a mask."""


def takes_lengths(attention: str | None) -> bool:
    """Return whether an implementation of attention is a FlashAttention of Transformers, with
    kernels that take lengths of documents."""
    return (
        attention is not None
        and "|" not in attention
        and ("flash_attention_" in attention or "flash-" in attention)
    )


def check_documents(name: str, read: Callable[[str], Any], attention: str | None, cp: int) -> None:
    """Refuse what `data.document_mask=true` does not work with.

    Args:
        name: name of the model in the message.
        read: function from the name of a field of its configuration to its value, or None.
        attention: `model.attn_implementation`.
        cp: context-parallel ranks; with more than one, this package's own attention replaces that
            of the model.

    Raises:
        ConfigError: the model has layers or positions, or the implementation of its attention has a
            mask, that do not keep documents apart.
    """
    why = ""
    if without := sorted(set(read("layer_types") or ()) & WITHOUT_ATTENTION):
        why = f"its {without[0]} layers carry a state from one document to the next"
    elif rope := rope_type(read):
        why = f"its rotary positions (rope_type {rope}) depend on the longest document of a sample"
    if why:
        raise ConfigError(
            f"data.document_mask=true cannot be used with {name}: {why}. Use"
            " data.document_mask=false, or a model with full or sliding attention and default"
            " rotary positions."
        )
    if (
        attention is not None
        and attention not in MASKED
        and not takes_lengths(attention)
        and cp == 1
    ):
        known = (*MASKED, "flash_attention_2")
        raise ConfigError(
            f"data.document_mask=true does not work with model.attn_implementation={attention},"
            f" which is not known to keep documents apart. Use {listed(known, last='or')}."
        )
