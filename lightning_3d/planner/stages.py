"""What each pipeline stage has of a model: blocks, embedding, head; and how many parameters these are on one rank. Pure Python."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lightning_3d.layout.balance import split_layers
from lightning_3d.planner.job import Job

_HEAD_WORK = 0.95


class Stage(NamedTuple):
    """Blocks of a stage, and whether it has the embedding and the output head."""

    blocks: int
    embedding: bool
    head: bool


@lru_cache(maxsize=1024)
def _split(kind: str, layers: int, stages: int, block: float, head: float) -> tuple[Stage, ...]:
    last = stages - 1
    if kind == "filled":
        counts, last = _filled(layers, stages, block, head)
    elif kind == "equal":
        base, more = divmod(layers, stages)
        counts = [base + (index < more) for index in range(stages)]
    else:
        counts = [len(part) for part in split_layers([block] * layers, [block] * layers, stages, last_extra=(head, head))]
    return tuple(Stage(count, index == 0, index == last) for index, count in enumerate(counts))


def _filled(layers: int, stages: int, block: float, head: float) -> tuple[list[int], int]:
    """(blocks of each stage, the stage with the head): the first stage takes blocks until it has more than its share of all work, then the
    next does. The head is a little less work than a block with as many weights."""
    counts, stage, done = [0] * stages, 0, 0.0
    total = layers * block + _HEAD_WORK * head
    for _ in range(layers):
        counts[stage] += 1
        done += block
        if stage < stages - 1 and done * stages > total * (stage + 1):
            stage += 1
    return counts, stage


def stages_of(job: Job) -> tuple[Stage, ...]:
    """All stages of a job, in their order."""
    model = job.model
    block = model.attention_size + model.mlp_size(model.ffn or model.expert_ffn * model.top_k + model.shared_ffn)
    return _split(job.stack.split, model.layers, job.layout.pp * job.layout.vp, float(block), float(model.embedding))


def parameters_of(job: Job, stage: Stage) -> tuple[float, float]:
    """(parameters, routed experts' parameters apart) of a stage on one rank: tensor-parallel ranks share what is cut, expert-parallel
    ranks the experts."""
    model, layout = job.model, job.layout
    whole = sum(matrix.size for matrix in model.attention if matrix.cut == "none") + model.norms
    dense = stage.blocks * ((model.dense_block - whole) / layout.tp + whole)
    ends = stage.embedding + stage.head - (stage.embedding and stage.head and model.tied)
    dense += ends * model.embedding / layout.tp
    return dense, stage.blocks * model.routed_block / (layout.ep if layout.ep > 1 else layout.tp)


def data_ranks(job: Job) -> tuple[int, int]:
    """How many ranks have the same (parameters, routed experts)."""
    layout = job.layout
    return layout.dp * layout.cp, layout.tp * layout.dp * layout.cp // layout.ep if layout.ep > 1 else layout.dp * layout.cp
