"""Content of each pipeline stage (blocks, embedding, head), and its parameters on one rank. Pure
Python."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_3d.app.planner.architecture import Architecture, BlockKind
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.stack import Split
from lightning_3d.layout.balance import Cost


class Stage(NamedTuple):
    """Number of blocks of each kind of a stage (`Architecture.kinds`), and flags for the embedding
    and the output head."""

    counts: tuple[int, ...]
    embedding: bool
    head: bool

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(self.counts)


def stages_of(job: Job) -> tuple[Stage, ...]:
    """Return all stages of a job in order."""
    if job.blocks is not None:
        return stages_with(job, job.blocks)
    return split_stages(job.stack.split, job.model, job.layout.pp * job.layout.vp)


def stage_kinds(job: Job) -> tuple[Stage, ...]:
    """Return the different stages of a job."""
    if job.blocks is not None:
        return tuple(dict.fromkeys(stages_with(job, job.blocks)))
    return _kinds(job.stack.split, job.model, job.layout.pp * job.layout.vp)


def stages_with(job: Job, blocks: tuple[int, ...]) -> tuple[Stage, ...]:
    """Return the stages with these numbers of blocks."""
    return _filled(job.model.pattern, job.model.ahead, blocks, len(blocks) - 1)


@lru_cache(maxsize=1024)
def split_stages(split: Split, model: Architecture, stages: int) -> tuple[Stage, ...]:
    """Return the stages of a model that a rule splits into so many."""
    kinds = block_work(model)
    blocks, last = split([kinds[kind] for kind in model.pattern], stages, *end_work(model))
    return _filled(model.pattern, model.ahead, tuple(blocks), last)


@lru_cache(maxsize=1024)
def _kinds(split: Split, model: Architecture, stages: int) -> tuple[Stage, ...]:
    return tuple(dict.fromkeys(split_stages(split, model, stages)))


def _filled(
    pattern: tuple[int, ...], ahead: int, blocks: tuple[int, ...], last: int
) -> tuple[Stage, ...]:
    """Return stages of consecutive blocks, the first with the embedding, and the one with the index
    `last` with the head and the blocks of `ahead`."""
    kinds = range(max(pattern) + 1)
    parts = [pattern[begin:end] for begin, end in pairwise(accumulate(blocks, initial=0))]
    parts[last] += pattern[-1:] * ahead
    return tuple(
        Stage(tuple(map(part.count, kinds)), index == 0, index == last)
        for index, part in enumerate(parts)
    )


def block_work(model: Architecture) -> tuple[Cost, ...]:
    """Return for each kind of block the (weights that a token is multiplied with, parameters), by
    which the engine balances stages.

    The engine takes all matrices of a block, so the biases of experts, which are one, count like
    weights.
    """
    parameters = [
        model.dense_parameters(kind) + model.routed_parameters(kind) for kind in model.kinds
    ]
    return tuple(
        (float(_weights(model, kind)), float(size))
        for kind, size in zip(model.kinds, parameters, strict=True)
    )


def _weights(model: Architecture, kind: BlockKind) -> int:
    return model.multiplied(kind) + (model.experts * model.expert_biases if kind.mixture else 0)


def end_work(model: Architecture) -> tuple[Cost, Cost]:
    """Return the (weights that a token is multiplied with, parameters) of the embedding, and of the
    final norm, the output head and the modules of multi-token prediction, which run the head
    again."""
    work, parameters = block_work(model)[model.pattern[-1]]
    weights = (1 + model.ahead) * model.embedding + model.ahead * (work + model.joining.size)
    held = (
        model.embedding + model.final_norm + model.ahead * (parameters + model.joining_parameters)
    )
    return (0.0, float(model.embedding + model.positions)), (float(weights), float(held))


def parameters_of(job: Job, stage: Stage) -> tuple[float, float]:
    """Return (parameters, parameters of routed experts) of a stage on one rank. The first number
    excludes the second."""
    model, layout = job.model, job.layout
    dense = routed = 0.0
    for count, (whole, split, experts) in zip(stage.counts, model.parameters_of_kinds, strict=True):
        dense += count * (split / layout.tp + whole)
        routed += count * experts
    ends = stage.embedding + stage.head - (stage.embedding and stage.head and model.tied)
    dense += ends * model.embedding / layout.tp + stage.embedding * model.positions
    dense += stage.head * (model.final_norm + model.ahead * model.joining_parameters)
    return dense, routed / (layout.ep if layout.ep > 1 else layout.tp)


def one_block(job: Job) -> tuple[Stage, ...]:
    """Return for each kind of block a stage that has only one of this kind."""
    return _one_of_each(len(job.model.kinds))


@lru_cache(maxsize=64)
def _one_of_each(kinds: int) -> tuple[Stage, ...]:
    return tuple(
        Stage(tuple(int(kind == other) for other in range(kinds)), False, False)
        for kind in range(kinds)
    )


def shard_ranks(job: Job) -> tuple[int, int]:
    """Count the ranks over which ZeRO shards (parameters, routed experts)."""
    layout = job.layout
    dense = job.shards * layout.cp
    return dense, layout.tp * dense // layout.ep if layout.ep > 1 else dense
