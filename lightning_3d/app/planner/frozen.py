"""Bytes and seconds of a frozen second model, the reference of DPO or a teacher, on a rank of the
last stage. Pure Python.

All of the model is there (`engine/frozen_models.py`): tensor-parallel ranks shard it if its sizes
divide, and context-parallel ranks split its sequences. It runs forward only, once for each
micro-batch, and keeps nothing for a backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.stages import Stage, one_block, parameters_of, shard_ranks
from lightning_3d.errors import LayoutError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import ModelSizes, check_model


def alone(job: Job) -> Job | None:
    """Return the job of the frozen model, on the ranks that share it; None without such a model."""
    model = job.frozen
    if model is None:
        return None
    layout = Layout(tp=job.layout.tp, cp=job.layout.cp)
    try:
        check_model(
            layout, ModelSizes(heads=model.heads, kv_heads=model.kv_heads, vocab=model.vocab)
        )
    except LayoutError:
        layout = replace(layout, tp=1)
    return replace(
        job,
        model=model,
        layout=layout,
        frozen=None,
        recompute="none",
        sequence_parallel=False,
        loss_chunks=1,
        blocks=None,
    )


@dataclass(frozen=True)
class FrozenWeights:
    """Parameters of the frozen model on a rank of the last stage, in bytes.

    With ZeRO 3, a rank keeps its part of them. While a batch is computed, it has the parameters
    outside the blocks, and while the frozen model runs, two blocks: one that runs, and the next
    one, which is gathered (`ParameterUnits`). With `gather="step"`, it has all of them while a
    batch is computed, unless the schedule splits the backward.

    Attributes:
        held: those that are there while a batch is computed.
        passing: those of the two blocks, if blocks are gathered one at a time.
        gathered: those that are gathered in a step.
    """

    held: float = 0.0
    passing: float = 0.0
    gathered: float = 0.0


def frozen_weights(job: Job) -> FrozenWeights:
    """Return the bytes of the frozen model; all are 0 without one."""
    second = alone(job)
    if second is None:
        return FrozenWeights()

    def size(stage: Stage) -> float:
        return sum(parameters_of(second, stage)) * job.frozen_bytes

    whole = size(Stage(second.model.counts, True, True))
    if job.zero != 3:
        return FrozenWeights(whole)
    part = whole / shard_ranks(job)[0]
    if not job.gathers_frozen_often:
        return FrozenWeights(part + whole, gathered=whole)
    outside = size(Stage((0,) * len(second.model.counts), True, True))
    return FrozenWeights(
        part + outside,
        2 * max(map(size, one_block(second))),
        outside + job.micro_batches * (whole - outside),
    )
