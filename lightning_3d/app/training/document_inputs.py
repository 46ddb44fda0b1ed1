"""What a causal LM of Transformers is called with, so that it keeps the documents of packed samples
apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_3d.compat.transformers_flash import document_lengths
from lightning_3d.models.document_limits import takes_lengths


def inputs_of(batch: Mapping[str, Tensor], model: Any) -> dict[str, Any]:
    """The arguments of a causal LM in a batch: tokens and, with a document mask, what keeps
    documents apart."""
    positions = batch.get("position_ids")
    return {
        "input_ids": batch["input_ids"],
        **({} if positions is None else arguments_of(model, positions)),
    }


def arguments_of(model: Any, positions: Tensor) -> dict[str, Any]:
    """Positions and, for FlashAttention, the lengths of documents.

    Args:
        model: a model of Transformers. With context parallelism, which replaces its attention,
            positions are enough.
        positions: (rows, seq), which restart at 0 with each document.
    """
    lengths = (
        document_lengths(positions) if takes_lengths(model.config._attn_implementation) else {}
    )
    return {"position_ids": positions, **lengths}
