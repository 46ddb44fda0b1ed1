"""The small copy of a model for the trial of documents (`document_trial`).

It has the model's blocks up to the first of each kind, because a block may need what an earlier one
has found. Large matrices are one row, repeated, which takes no memory, and there are few token ids.
Windows of attention, compressed blocks and other lengths in tokens are shorter than the trial's
documents (`token_lengths`): their edges must follow documents.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_3d.app.training.token_lengths import shorten
from lightning_3d.engine.self_check.model_copy import (
    copy_without_values,
    kinds_of,
    leave_out_blocks,
)
from lightning_3d.errors import PlanError
from lightning_3d.models.parallel_plan import read_plan
from lightning_3d.parallel.trials.clone import in_float64
from lightning_3d.parallel.trials.values import FewRows, draw
from lightning_3d.weights.initialize import initialize

IDS = 64
"""Token ids of the copy: rows of its embeddings and of its head."""

_LENGTH = 3
"""Tokens of a window, a chunk or a compressed block of attention in the copy."""


def trial_copy(model: nn.Module, values: FewRows) -> Any:
    """Copy a model for the trial: float64 on the CPU, random weights, one block of each kind at
    least.

    Args:
        model: a whole causal LM of Transformers, whose values are not read. It may be on meta.
        values: draws the weights, and is the context in which the copy runs.
    """
    copied = copy_without_values(model)
    _leave_out_later_blocks(copied)
    shorten(copied, _LENGTH)
    by_id = _values_by_id(copied)
    drawn: dict[int, nn.Parameter] = {}
    for name, child in copied.named_modules():
        if isinstance(child, nn.Embedding):
            child.padding_idx = None
        for key, value in child._parameters.items():
            if value is not None:
                if id(value) not in drawn:
                    blank = value[:IDS] if id(value) in by_id else value
                    drawn[id(value)] = nn.Parameter(
                        values.draw(f"{name}.{key}", blank), value.requires_grad
                    )
                child._parameters[key] = drawn[id(value)]
        _draw_saved_buffers(name, child)
        config = vars(child).get("config")
        # same masks, but on the CPU it does not know sinks
        if getattr(config, "_attn_implementation", None) == "flex_attention":
            config._attn_implementation_internal = "eager"
    initialize(copied, device="cpu")  # buffers that are on meta
    return in_float64(copied)


def _draw_saved_buffers(name: str, child: nn.Module) -> None:
    """Give random values to buffers on meta that are saved with the weights, in place: the values
    are those of a checkpoint (xIELU)."""
    for key, buffer in child._buffers.items():
        if (
            buffer is not None
            and buffer.is_meta
            and buffer.is_floating_point()
            and key not in child._non_persistent_buffers_set
        ):
            child._buffers[key] = draw(f"{name}.{key}", tuple(buffer.shape))


def _values_by_id(model: Any) -> set[int]:
    """Parameters with a row for each token id or position, by `id`. A module that contains the head
    may have its bias too."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    owners: list[nn.Module] = [
        child for child in model.modules() if isinstance(child, nn.Embedding)
    ]
    owners += [] if head is None else [head]
    return {
        id(value) for owner in owners for value in owner._parameters.values() if value is not None
    }


def _leave_out_later_blocks(copied: nn.Module) -> None:
    """Replace the blocks after the first of each kind, and after the second block, in place; none
    where the model does not name its blocks.

    All earlier blocks stay, because some hand over more than hidden states: the tokens that an
    indexer chose, or keys and values.
    """
    try:
        plan = read_plan(copied)
    except PlanError:
        return
    if plan.layers:
        kinds = kinds_of(list(copied.get_submodule(plan.layers).children()))
        last = max((indices[0] for indices in kinds), default=0)
        leave_out_blocks(copied, plan, list(range(max(last, 1) + 1)), {})
