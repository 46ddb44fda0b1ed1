"""The tokenizer that belongs to the groups `data` and `model`. Pure: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BYTES = "bytes"
"""Name of the tokenizer whose token ids are bytes, and whose id 256 ends a document."""

_BYTE_DATA = ("python_stdlib", "python_tokens", "python_pairs")


def tokenizer_of(model: Mapping[str, Any], data: Mapping[str, Any]) -> str | None:
    """Return the tokenizer of a run, from its groups: a folder, a name on the hub, or "bytes"; None
    if no key names it."""
    named = (
        data.get("tokenizer"),
        BYTES if data.get("name") in _BYTE_DATA else None,
        model.get("pretrained"),
    )
    return next((str(name) for name in named if name), None)
