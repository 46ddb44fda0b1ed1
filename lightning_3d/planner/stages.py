"""Content of each pipeline stage (blocks, embedding, head), and its parameters on one rank. Pure Python."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lightning_3d.planner.job import Job
from lightning_3d.planner.stack import Split


class Stage(NamedTuple):
    """Number of blocks of a stage, and flags for the embedding and the output head."""

    blocks: int
    embedding: bool
    head: bool


@lru_cache(maxsize=1024)
def _stages(split: Split, layers: int, stages: int, block: float, head: float) -> tuple[Stage, ...]:
    counts, last = split(layers, stages, block, head)
    return tuple(Stage(count, index == 0, index == last) for index, count in enumerate(counts))


def stages_of(job: Job) -> tuple[Stage, ...]:
    """Return all stages of a job in order."""
    model = job.model
    if job.blocks is not None:
        last = len(job.blocks) - 1
        return tuple(Stage(count, index == 0, index == last) for index, count in enumerate(job.blocks))
    return _stages(job.stack.split, model.layers, job.layout.pp * job.layout.vp, *work_units(job))


def work_units(job: Job) -> tuple[float, float]:
    """Return the work of (a block, the output head), by which stages are balanced: parameters that a token is multiplied with."""
    model = job.model
    block = model.attention_size + model.mlp_size(model.ffn or model.expert_ffn * model.top_k + model.shared_ffn)
    return float(block), float(model.embedding)


def parameters_of(job: Job, stage: Stage) -> tuple[float, float]:
    """Return (parameters, parameters of routed experts) of a stage on one rank. The first number excludes the second."""
    model, layout = job.model, job.layout
    whole = sum(matrix.size for matrix in model.attention if matrix.sharded_by == "none") + model.norms
    dense = stage.blocks * ((model.dense_block - whole) / layout.tp + whole)
    ends = stage.embedding + stage.head - (stage.embedding and stage.head and model.tied)
    dense += ends * model.embedding / layout.tp + stage.embedding * model.positions
    return dense, stage.blocks * model.routed_block / (layout.ep if layout.ep > 1 else layout.tp)


def shard_ranks(job: Job) -> tuple[int, int]:
    """Count the ranks over which ZeRO shards (parameters, routed experts)."""
    layout = job.layout
    dense = job.shards * layout.cp
    return dense, layout.tp * dense // layout.ep if layout.ep > 1 else dense
