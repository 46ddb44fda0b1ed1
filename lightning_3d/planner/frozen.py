"""Bytes and seconds of a frozen second model, the reference of DPO or a teacher, on a rank of the last stage. Pure Python.

All of the model is there (`strategy/frozen_models.py`): tensor-parallel ranks shard it if its sizes divide, and context-parallel ranks run
whole sequences. It runs forward only, once for each micro-batch, and keeps nothing for a backward pass.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_3d.errors import LayoutError
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import ModelSizes, check_model
from lightning_3d.planner.job import Job
from lightning_3d.planner.stages import Stage, parameters_of, shard_ranks


def alone(job: Job) -> Job | None:
    """Return the job of the frozen model, on the ranks that shard it; None without such a model."""
    model = job.frozen
    if model is None:
        return None
    layout = Layout(tp=job.layout.tp)
    try:
        check_model(layout, ModelSizes(heads=model.heads, kv_heads=model.kv_heads, vocab=model.vocab))
    except LayoutError:
        layout = Layout()
    return replace(job, model=model, layout=layout, frozen=None, recompute="none", sequence_parallel=False, loss_chunks=1, blocks=None)


def frozen_weights(job: Job) -> float:
    """Return the bytes of the parameters of the frozen model on a rank of the last stage; 0 without one.

    With ZeRO 3, a rank keeps its part, and gathers all of them while a batch is computed (`parallel/zero/parameter_units.py`).
    """
    second = alone(job)
    if second is None:
        return 0.0
    counts = parameters_of(second, Stage(second.model.counts, True, True))
    whole = sum(counts) * job.frozen_bytes
    return whole + whole / shard_ranks(job)[0] if job.zero == 3 else whole
