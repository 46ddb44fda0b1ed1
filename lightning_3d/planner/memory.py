"""Bytes of one GPU at the peak of a step. Pure Python.

Of N parameters on a rank, d data-parallel ranks (ZeRO: Rajbhandari et al., arXiv:1910.02054, section 3):

    weights 2 N (stage 3: / d), gradients (stages 2 and 3: / d), optimizer with fp32 master weights 12 N (stages 1 to 3: / d)

with fp32 weights 4 N and 8 N; all in 16 bits 2 N and 4 N. Of a block and a token, with hidden size h, queries q, keys and values k, inner
width f, a heads, s tokens, t tensor-parallel ranks (Korthikanti et al., arXiv:2205.05198, section 4, for a gated MLP and grouped-query
attention instead of GPT's):

    8 h       inputs of two norms and of what follows them; / t with sequence parallelism
    (4 q + 2 k + 4 a) / t    queries, keys, values, output and log-sum-exp of attention; 5 a s / t more without a fused kernel
    6 f / t   gate, up and their product; 4 f / t without gate

Software that is not fused keeps more (`Stack.saved`, `saved_keys`, `saved_inner`). A caching allocator asks the driver for a block of its
own for each large tensor, and does not give it back: a tensor that is larger than every block which a pass has left comes on top of all of
them, though its moment is another one (`_beside`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_3d.layout.schedules import find_schedule, stages_of_rank
from lightning_3d.planner.job import Job
from lightning_3d.planner.stages import Stage, data_ranks, parameters_of, stages_of
from lightning_3d.planner.timeline import in_flight

_WORD = 4
"""Bytes of a number in 32 bits."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, by what they hold. `other`: collectives, the allocator, CUDA."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    other: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss + self.other


def memory_of(job: Job, *, queue: float = 1.0, room: float = float("inf"), first: bool = False) -> Memory:
    """Of the rank that needs most.

    Args:
        first: of the first pipeline rank instead.
        queue: share of what may wait to be freed beside collectives that does wait; 0 where the host is slower than the GPU. With no more
            micro-batches than stages the GPU is idle before the first backward pass, and nothing waits any more.
        room: bytes beyond which the allocator gives back what it has in reserve before it asks for more: spare gradients, copies, what
            waits, and what its blocks are larger than needed.
    """
    layout = job.layout
    if layout.pp > 1 and job.micro_batches <= layout.pp:
        queue = 0.0
    ranks, blocks = _pipeline(job), _blocks(job)
    asked = set(ranks[:1] if first else ranks)
    fullest, stage_counts = max(((_rank(job, one, queue, blocks), one) for one in asked), key=lambda pair: pair[0].total)
    if fullest.total <= room:
        return fullest
    lean = _rank(replace(job, stack=replace(job.stack, **_NOTHING_SPARE)), stage_counts, 0.0, blocks)
    share = max(0.0, room - lean.total) / max(1.0, fullest.total - lean.total)
    return Memory(**{name: least + share * (getattr(fullest, name) - least) for name, least in asdict(lean).items()})


def memory_of_all(job: Job) -> Memory:
    """Of all ranks together, each at its peak: what a host needs on whose cores they all run."""
    pipelines, blocks = job.layout.world_size // job.layout.pp, _blocks(job)
    ranks = [asdict(_rank(job, own, 0.0, blocks)) for own in _pipeline(job)]
    return Memory(**{name: pipelines * sum(rank[name] for rank in ranks) for name in ranks[0]})


def _pipeline(job: Job) -> list[tuple[tuple[Stage, int], ...]]:
    """Of each rank of a pipeline, its stages, each with the most micro-batches that are in flight."""
    layout, stages = job.layout, stages_of(job)
    live = in_flight(job.schedule, layout.pp, layout.vp, _enough(job))
    v_shaped = find_schedule(job.schedule).v_shaped and layout.pp > 1
    ranks = [stages_of_rank(rank, layout.pp, layout.vp, v_shaped) for rank in range(layout.pp)]
    return [tuple((stages[index], live[rank].get(index, 0)) for index in own) for rank, own in enumerate(ranks)]


_NOTHING_SPARE: dict[str, Any] = {
    "spare_gradient_bytes": 0.0,
    "bucket_bytes": 0.0,
    "gathered_copies": 0,
    "largest_gradient": False,
    "overhead": 1.0,
}


def least_memory(job: Job) -> float:
    """Bytes that the fullest rank needs at least, whatever the schedule and the ZeRO stage: all of its blocks, and as many micro-batches as
    there are stages on the way (1F1B's first rank; the other schedules keep as much or more)."""
    layout = job.layout
    lean = replace(job, zero=3, gather="micro_batch", reduce="micro_batch") if layout.dp * layout.cp > 1 else job
    share = Stage(job.model.layers // layout.pp, False, False)
    memory = _rank(lean, ((share, min(job.micro_batches, layout.pp)),), 0.0, _blocks(lean))
    return memory.total - lean.stack.spare_gradient_bytes * sum(parameters_of(job, share)) * (layout.dp * layout.cp == 1)


def _enough(job: Job) -> int:
    """Micro-batches after which more of them do not change what is in flight: orders repeat (GPipe and LoopedBFS keep all)."""
    info, layout, count = find_schedule(job.schedule), job.layout, job.micro_batches
    if layout.pp == 1 and layout.vp == 1:
        return min(count, 2)
    if info.name in ("GPipe", "LoopedBFS"):
        return count
    if count % layout.pp == 0:  # two rounds are as many as are ever on the way
        return min(count, 2 * layout.pp)
    for fewer in range(4 * layout.pp * layout.vp, count, layout.pp):
        if info.accepts(layout.pp, layout.vp, fewer):
            return fewer
    return count


def _blocks(job: Job) -> tuple[float, float]:
    """Bytes of a micro-batch that a block (keeps, computes anew while its backward pass runs)."""
    return kept_by_block(job), block_activations(job) if job.recompute != "none" else 0.0


def _rank(job: Job, own: tuple[tuple[Stage, int], ...], queue: float, blocks: tuple[float, float]) -> Memory:
    """A rank that has some stages, each with so many micro-batches in flight."""
    model, stack = job.model, job.stack
    stages = [stage for stage, _ in own]
    counts = [parameters_of(job, stage) for stage in stages]
    sharers = data_ranks(job)
    weights = gradients = optimizer = 0.0
    for parameters, ranks in zip(map(sum, zip(*counts, strict=True)), sharers, strict=True):
        weights += parameters * job.weight_bytes / (ranks if job.zero == 3 else 1)
        spare = 0.0 if job.reduces_often else stack.spare_gradient_bytes
        gradients += parameters * job.trained * (stack.gradient_bytes / (ranks if job.reduces_often else 1) + spare)
        optimizer += parameters * job.trained * job.state_bytes / (ranks if job.zero >= 1 else 1)
    if job.zero == 3 and not job.gathers_often:
        weights += sum(map(sum, counts)) * job.weight_bytes
    elif job.zero == 3:  # two blocks, and what is beside the blocks, are whole at a time
        block = sum(parameters_of(job, Stage(1, False, False)))
        weights += (2 * block + any(stage.embedding or stage.head for stage in stages) * model.embedding / job.layout.tp) * job.weight_bytes
    kept = sum(count * stage.blocks for stage, count in own) * blocks[0]
    head = sum(1 for stage in stages if stage.head)
    logits = head * job.tokens * model.vocab / job.layout.tp
    loss = logits * (stack.logit_bytes + (stack.kept_logit_bytes if job.micro_batches > 1 else 0.0))
    waiting = queue * stack.queued * 2 * job.tokens * model.hidden * (job.layout.tp > 1)
    activations = kept + blocks[1]
    if stack.bucket_bytes or stack.gathered_copies or stack.largest_gradient:
        gradients += _beside(job, sum(map(sum, counts)), any(stage.embedding for stage in stages), bool(head))
    other = (stack.overhead - 1) * (activations + loss) + waiting + stack.context
    return Memory(weights, gradients, optimizer, activations, loss, other)


def _beside(job: Job, parameters: float, embedding: bool, head: bool) -> float:
    """Bytes of what is not alive together with the activations but larger than each of their blocks: the gradient of the embedding, the
    copies in which parameters are gathered. And buckets of gradients, which always are."""
    model, stack, tp, sharers = job.model, job.stack, job.layout.tp, job.layout.dp * job.layout.cp
    inner = (2 if model.gated else 1) * max(model.ffn, model.expert_ffn) / tp
    largest = job.tokens * max(job.width * inner, _WORD * model.vocab / tp if head else 0.0, job.width * model.hidden)
    gradient = job.width * model.embedding / tp
    size = gradient if stack.largest_gradient and embedding and gradient > largest else 0.0
    if sharers > 1 and job.zero == 0:
        size += stack.bucket_bytes * parameters
    elif sharers > 1 and job.zero == 1:
        whole = job.weight_bytes * parameters
        size += sum(whole for copy in range(stack.gathered_copies) if (whole if copy else whole / sharers) > largest)
    return size


def kept_by_block(job: Job) -> float:
    """Bytes of one micro-batch that a block keeps for its backward pass."""
    model, layout = job.model, job.layout
    whole = block_activations(job)
    if job.recompute == "none":
        return whole
    if job.recompute == "full":
        least = 2 * job.tokens * model.hidden / (layout.tp if job.sequence_parallel else 1)
    elif job.stack.selective_share is not None:
        least = whole * job.stack.selective_share
    else:
        core = 2 * (model.query_width + model.key_width) + (0 if job.stack.flash else 5 * model.heads * job.seq)
        least = whole - job.tokens * core / layout.tp / 2
    return least / job.recompute_every + whole * (1 - 1 / job.recompute_every)


def block_activations(job: Job) -> float:
    """Bytes of one micro-batch that a block without recomputation keeps, averaged over dense blocks and mixtures."""
    model, layout, tokens = job.model, job.layout, job.tokens
    width = job.width
    shared = 4 * model.hidden * width / (layout.tp if job.sequence_parallel else 1) + job.stack.saved * model.hidden / layout.tp
    attention = (width * (2 * model.query_width + model.key_width) + 4 * model.heads + job.stack.saved_keys * model.key_width) / layout.tp
    if not job.stack.flash:
        attention += 5 * model.heads * job.seq / layout.tp
    mixtures = (model.layers - model.dense_layers) / model.layers
    inner = (1 - mixtures) * model.ffn / layout.tp
    if mixtures:
        cut = layout.tp  # experts are cut, or the tokens are shared before they are sent
        inner += mixtures * (model.top_k * model.expert_ffn + model.shared_ffn) / cut
        shared += mixtures * 4 * width * model.top_k * model.hidden / cut / 2  # what is sent to experts and comes back
    factor = 3 if model.gated else 2
    return tokens * (shared + attention + (factor * width + job.stack.saved_inner) * inner)
