"""Which kind of fault a difference looks like, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from lightning_3d.app.verification.differences import (
    BUFFERS,
    LOGGED,
    LOSS,
    NORM,
    OPTIMIZER,
    START,
    STEPS,
    WEIGHTS,
    Comparison,
    Difference,
)

ROWS = "the loss is not a mean over rows"
PARTS = "the step uses what only one rank's part can answer"
GRADIENTS = "gradients of some parameters are changed on the way"
TOGETHER = "gradients depend on which rows are computed together"
WRITTEN = "gradients or weights are changed by hand"
OPTIMIZED = "the optimizer does something else"
COUNTED = "a layer sees the batch or counts its calls"
VALUES = "a logged value is not a mean over rows, or only some ranks have it"
BEGINNING = "the runs do not start from the same weights"
READING = "the ranks read other rows"
LENGTH = "the runs have different numbers of batches"
NOT_A_NUMBER = "a number is not finite"
ITSELF = "one rank of this strategy computes something else"

_AVERAGES = ("exp_avg", "momentum_buffer")
"""Names of states that differ where gradients do."""

_WHAT_TO_DO = {
    ROWS: (
        "Contrastive pairs, sums, class weights, mixup, variance terms and batch statistics depend"
        " on which rows are computed together. Use a layout without dp and pp, such as tp2, without"
        " micro_batch_size. Or write the loss as a mean over rows."
    ),
    PARTS: (
        "Look in training_step for parameters that are read outside the model's own call"
        " (penalties, a head's weight in the loss), for self.all_gather and own collectives, and"
        " for values that one block writes and another reads. Compute them inside the model's"
        " forward, or use a layout of dp alone. If the model or its plan is your own,"
        ' self_check="always" compares its blocks.'
    ),
    GRADIENTS: (
        "Look for hooks on parameters and modules (register_hook,"
        " register_post_accumulate_grad_hook) and for layers that change gradients. Put the change"
        " into a module's forward, or freeze parameters with requires_grad_(False)."
    ),
    TOGETHER: (
        "Look for hooks on parameters and modules, for layers that count (scale_grad_by_freq), and"
        " for losses that are divided by a value of the batch. Use a layout without dp and pp, such"
        " as tp2, without micro_batch_size."
    ),
    WRITTEN: (
        "Look for hooks that clip, scale or mask gradients, or that write weights, on each rank by"
        " itself, and for parameter groups chosen by id or shape. Use gradient_clip_val, or"
        " self.clip_gradients in configure_gradient_clipping."
    ),
    OPTIMIZED: (
        "Look for parameter groups chosen by id or shape, and for an optimizer that computes norms"
        " over a whole parameter."
    ),
    COUNTED: (
        "Batch norm, spectral norm, running values and counters see each micro-batch of each rank"
        " by itself. Use layer or group norm, or freeze the statistics."
    ),
    VALUES: (
        "Log a mean over rows, or a torchmetrics object. An attribute that a block writes is not"
        " there on the ranks of other stages: return it from the model's forward."
    ),
    BEGINNING: (
        "Call seed_everything(0, workers=True) before the module is made, and make it in the same"
        " way on each rank. Look for layers and hooks that write weights before the first step"
        " (max_norm of an embedding in the sanity check, for example)."
    ),
    READING: (
        "Let Lightning give the DataLoader its sampler (use_distributed_sampler=True), with"
        " batch_size = global batch / dp. All ranks must draw the same order."
    ),
    LENGTH: "Look for code that ends a fit by what one rank has read.",
    NOT_A_NUMBER: (
        "Look at the step that makes it: a division by a small number, or a mean over a micro-batch"
        " without targets."
    ),
    ITSELF: (
        "Look for hooks, swapped parameters and modules with a state of their own. If there is"
        " none, this is a fault of lightning_3d: please report it with the script."
    ),
}


def kind_of(
    comparison: Comparison, alone: Comparison | None, alone_whole: Comparison | None
) -> str:
    """Name the kind that the first difference looks like.

    Args:
        comparison: the layout against one process; it differs.
        alone: one rank of the strategy with the same micro-batches against one process.
        alone_whole: the same without micro-batches.
    """
    first = comparison.found[0]
    if not isfinite(first.ours) or not isfinite(first.theirs):
        return NOT_A_NUMBER
    if first.what in (START, STEPS):
        return BEGINNING if first.what == START else LENGTH
    if first.what == BUFFERS:
        return COUNTED
    if _same_kind(first, alone_whole):
        return ITSELF if first.what != LOGGED else VALUES
    if _same_kind(first, alone) and first.what in (LOSS, NORM):
        kind = ROWS if first.what == LOSS else TOGETHER
        return kind if alone_whole is not None else ITSELF
    if first.what == OPTIMIZER and first.name.startswith(_AVERAGES):
        return WRITTEN
    kinds = {LOSS: PARTS, NORM: GRADIENTS, LOGGED: VALUES, WEIGHTS: WRITTEN, OPTIMIZER: OPTIMIZED}
    return kinds[first.what]


def _same_kind(first: Difference, other: Comparison | None) -> bool:
    """Whether another comparison differs in the same value or one before it."""
    return other is not None and any(found.step <= first.step for found in other.found)


def describe(kind: str) -> str:
    """Say what to do about a kind."""
    return _WHAT_TO_DO[kind]


def first_line(first: Difference, layout: str) -> str:
    """Name the first difference, with the numbers of both runs."""
    name = f" {first.name}" if first.name else ""
    where = f" (rank {first.rank})" if first.rank is not None else ""
    when = f"of step {first.step}" if first.step else "before the first step"
    size = f"{first.how} difference {first.size:.2g}, allowed {first.allowed:.1g}"
    return (
        f"{first.what}{name} {when}: {first.ours:.8g} in {layout}{where}, {first.theirs:.8g} on one"
        f" process ({size})"
    )


def further_lines(
    alone: Comparison | None, alone_whole: Comparison | None, facts: Mapping[str, Any]
) -> list[str]:
    """Say what further runs have shown."""
    lines = []
    for other, how in (
        (alone, f"with micro-batches of {facts['micro_batch_rows']} rows"),
        (alone_whole, "without micro-batches"),
    ):
        if other is not None:
            found = (
                f"differs: {first_line(other.found[0], 'this strategy')}" if other.found else "same"
            )
            lines.append(f"one rank of this strategy {how}: {found}")
    return lines
