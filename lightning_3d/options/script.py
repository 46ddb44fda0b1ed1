"""Options that a script gives, and other groups than `parallelism` on the command line. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_3d.options.reliability import NONFINITE, STOP, Reliability
from lightning_3d.options.schema import SPEED, OptionGroup, one_of, option

SplitBatch = Callable[[Any, int], Sequence[Any]]
"""Function (batch, n) -> n micro-batches."""


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(OptionGroup):
    """Options that are no keys of the group `parallelism`: `seed`, `precision` and `trainer` set
    most of them."""

    fp8: bool = option(
        False,
        "whether linear layers of the model's blocks multiply in float8; needs"
        ' Trainer(precision="bf16-true")',
        beyond_torch=SPEED,
    )
    split_batch: SplitBatch | None = option(
        None,
        "function (batch, n) -> n micro-batches, for batches that cannot be split along"
        " dimension 0",
    )
    trace_every_n_steps: int | None = option(
        None,
        "trace every n-th optimizer step; last_step.trace then records what each rank did when, and"
        " what it held in memory. null: only steps requested with trace_next_step()",
        beyond_torch=SPEED,
    )
    nonfinite: str = option(
        STOP,
        "what to do when the loss or the gradient norm of a step is not finite. stop raises"
        " NonFiniteError on all ranks before the optimizer steps, skip skips the optimizer step,"
        " ignore steps anyway",
        one_of(*NONFINITE),
    )
    seed: int | None = option(
        None,
        "seed of weights initialized from the meta device and of dropout. null: the seed of"
        " seed_everything, or 0",
    )
    timeout: timedelta | None = option(None, "timeout of collectives. null: 30 minutes")
    reliability: Reliability | Mapping[str, Any] | None = option(
        None,
        "what watches over the run between checkpoints, a Reliability or a mapping of its"
        ' attributes, such as {"hang_timeout": 300}',
    )
