"""Bytes of one GPU at the peak of a step. Pure Python.

Of N parameters on a rank, d data-parallel ranks that shard (ZeRO: Rajbhandari et al., arXiv:1910.02054, section 3):

    weights 2 N (stage 3: / d), gradients (stages 2 and 3: / d), optimizer with fp32 master weights 12 N (stages 1 to 3: / d)

with fp32 weights 4 N and 8 N; all in 16 bits 2 N and 4 N. Of a block and a token, with hidden size h, queries q, keys and values k, inner
width f, a heads, s tokens, t tensor-parallel ranks (Korthikanti et al., arXiv:2205.05198, section 4, for a gated MLP and grouped-query
attention instead of GPT's):

    8 h       inputs of two norms and of what follows them; / t with sequence parallelism
    (4 q + 2 k + 4 a) / t    queries, keys, values, output and log-sum-exp of attention; 5 a s / t more without a fused kernel
    6 f / t   gate, up and their product; 4 f / t without gate

Software that is not fused keeps more (`Footprint.saved`, `saved_inner`). Compiled blocks keep no more, and with sequence parallelism only
the inputs of the norms: 4 h / t instead of 8 h / t.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from lightning_3d.layout.schedules import find_schedule, stages_of_rank
from lightning_3d.models.spec import Kept
from lightning_3d.planner.architecture import Kind
from lightning_3d.planner.frozen import frozen_weights
from lightning_3d.planner.job import Job
from lightning_3d.planner.stages import Stage, one_block, parameters_of, shard_ranks, stages_of
from lightning_3d.planner.timeline import in_flight

_LOG_SOFTMAX = 4
"""Bytes that the loss keeps of a logit until its backward: the log-softmax in float32. Of a vocabulary that tp shards, 16-bit logits."""

StagesOfRank = tuple[tuple[Stage, int], ...]
"""Stages of a pipeline rank, each with the most micro-batches of it that are in flight."""

BlockBytes = tuple[tuple[float, float], ...]
"""Bytes of a micro-batch that each kind of block (keeps, recomputes while its backward pass runs)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, by category. `other`: collectives, the allocator, CUDA."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    other: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.loss + self.other


def memory_of(job: Job) -> Memory:
    """Return the memory of the rank that needs most."""
    blocks = block_bytes(job)
    return max((memory_of_rank(job, own, blocks) for own in _fullest(stages_in_flight(job))), key=lambda memory: memory.total)


def _fullest(ranks: Sequence[StagesOfRank]) -> Iterator[StagesOfRank]:
    """Yield ranks without those that have the same stages as another one and no more micro-batches in flight."""
    found: dict[tuple[Stage, ...], list[tuple[int, ...]]] = {}
    for own in ranks:
        stages, live = tuple(stage for stage, _ in own), tuple(count for _, count in own)
        others = found.setdefault(stages, [])
        if not any(_covers(other, live) for other in others):
            others[:] = [*(other for other in others if not _covers(live, other)), live]
    for stages, counts in found.items():
        yield from (tuple(zip(stages, live, strict=True)) for live in counts)


def _covers(more: tuple[int, ...], less: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(more, less, strict=True))


def memory_of_all(job: Job) -> Memory:
    """Return the memory of all ranks together, each at its peak, for a host that runs them all."""
    pipelines, blocks = job.layout.world_size // job.layout.pp, block_bytes(job)
    ranks = [asdict(memory_of_rank(job, own, blocks)) for own in stages_in_flight(job)]
    return Memory(**{name: pipelines * sum(rank[name] for rank in ranks) for name in ranks[0]})


def stages_in_flight(job: Job) -> list[StagesOfRank]:
    """Return for each rank of a pipeline its stages, each with the most micro-batches in flight."""
    stages = stages_of(job)
    return [tuple((stages[index], count) for index, count in own) for own in indices_in_flight(job)]


def indices_in_flight(job: Job) -> list[tuple[tuple[int, int], ...]]:
    """Return for each rank of a pipeline the indices of its stages, each with the most micro-batches in flight."""
    layout = job.layout
    live = in_flight(job.schedule, layout.pp, layout.vp, _enough(job))
    v_shaped = find_schedule(job.schedule).v_shaped and layout.pp > 1
    ranks = [stages_of_rank(rank, layout.pp, layout.vp, v_shaped) for rank in range(layout.pp)]
    return [tuple((index, live[rank].get(index, 0)) for index in own) for rank, own in enumerate(ranks)]


def least_memory(job: Job, levels: Sequence[str], *, balanced: bool = True) -> Iterator[tuple[str, float]]:
    """Yield for each level of recomputation a lower bound of the fullest rank's bytes for all schedules and ZeRO stages: all of its blocks,
    and as many micro-batches in flight as there are stages (1F1B's first rank; the other schedules keep as much or more).

    Args:
        balanced: whether stages have equal work; otherwise the rank with most blocks may have one micro-batch in flight.
    """
    layout = job.layout
    alone = layout.dp * layout.cp == 1
    lean = replace(job, zero=0) if alone else replace(job, zero=3, gather="micro_batch", reduce="micro_batch")
    share = _smallest_share(job)
    spare = lean.stack.footprint.spare_gradient * sum(parameters_of(job, share)) * alone
    for level in levels:
        again = replace(lean, recompute=level)
        kinds = block_bytes(again)
        least = (min(kept for kept, _ in kinds), min(temporary for _, temporary in kinds))
        memory = memory_of_rank(again, ((share, min(job.micro_batches, layout.pp) if balanced else 1),), (least,) * len(kinds))
        yield level, memory.total - spare


def _smallest_share(job: Job) -> Stage:
    """Return a stage with the blocks that have the fewest parameters, as many as an equal share, or as the first stage if that has fewer:
    the engine gives it fewer where the embedding is large."""
    model, alone = job.model, one_block(job)
    first = stages_of(replace(job, layout=replace(job.layout, vp=1), blocks=None))[0].blocks
    counts, rest = [0] * len(alone), min(first, model.layers // job.layout.pp)
    for kind in sorted(range(len(alone)), key=lambda kind: sum(parameters_of(job, alone[kind]))):
        counts[kind] = min(rest, model.counts[kind])
        rest -= counts[kind]
    return Stage(tuple(counts), False, False)


def _enough(job: Job) -> int:
    """Return a number of micro-batches with the same peak in flight as the job's, but fewer to play: orders repeat (GPipe and LoopedBFS
    keep all)."""
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


def block_bytes(job: Job) -> BlockBytes:
    """Return the bytes of a micro-batch that each kind of block keeps and recomputes."""
    again = job.recompute != "none"
    return tuple((kept_by_block(job, kind), block_activations(job, kind) if again else 0.0) for kind in job.model.kinds)


def memory_of_rank(job: Job, own: StagesOfRank, blocks: BlockBytes) -> Memory:
    """Memory of one rank.

    Args:
        own: stages of the rank, each with its micro-batches in flight.
        blocks: what `block_bytes` returns.
    """
    model, footprint = job.model, job.stack.footprint
    stages = [stage for stage, _ in own]
    known = {stage: parameters_of(job, stage) for stage in set(stages)}
    counts = [known[stage] for stage in stages]
    inner = [parameters_of(job, Stage(stage.counts, False, False)) if job.saved_block_bytes else (0.0, 0.0) for stage in stages]
    kinds = [kind for kind in range(len(blocks)) if any(stage.counts[kind] for stage in stages)]
    sharers = shard_ranks(job)
    weights = gradients = kept_gradients = optimizer = 0.0
    sums = (map(sum, zip(*numbers, strict=True)) for numbers in (counts, inner))
    early = job.reduces_often, job.reduces_often and not job.reduces_experts_late
    for parameters, of_blocks, ranks, often in zip(*sums, sharers, early, strict=True):
        weights += parameters * job.weight_bytes / (ranks if job.zero == 3 else 1)
        at_end = footprint.gradient + footprint.spare_gradient
        gradients += parameters * job.trained * (footprint.gradient / ranks if often else at_end)
        if job.zero > 0 and not often:
            kept_gradients += parameters * job.trained * footprint.kept_gradient / (1 if job.buffers_all_gradients else ranks)
        state = parameters * job.state_bytes - of_blocks * job.saved_block_bytes
        optimizer += job.trained * state / (ranks if job.zero >= 1 else 1)
    passing = 0.0  # bytes of blocks that are gathered one at a time
    if job.zero == 3 and not job.gathers_often:
        weights += sum(map(sum, counts)) * job.weight_bytes
    elif job.zero == 3:  # two blocks, and the parts outside of blocks, are gathered at the same time
        alone = one_block(job)
        block = max((sum(parameters_of(job, alone[kind])) for kind in kinds), default=0.0)
        passing = 2 * block * job.weight_bytes
        weights += passing + any(stage.embedding or stage.head for stage in stages) * model.embedding / job.layout.tp * job.weight_bytes
    kept = sum(live * sum(count * keeps for count, (keeps, _) in zip(stage.counts, blocks, strict=True)) for stage, live in own)
    of_ahead, again_ahead = _ahead_bytes(job)
    kept += sum(live * (_travelling_bytes(job) + stage.head * model.ahead * of_ahead) for stage, live in own)
    heads = sum(stage.head for stage in stages)
    vocabulary = model.vocab / job.layout.tp
    loss = heads * vocabulary * job.tokens / job.loss_parts * job.stack.logit_bytes(job.micro_batches)
    if job.loss_parts == 1:  # while one head has its backward, the others keep what theirs needs
        loss += heads * model.ahead * vocabulary * job.tokens * _LOG_SOFTMAX
    if job.loss_parts > 1:  # the gradient of the head's weight: its sum in float32, and one for each micro-batch whose backward is to come
        loss += vocabulary * model.hidden * sum(4 + job.width * count * (1 + model.ahead) for stage, count in own if stage.head)
    if heads:
        frozen = frozen_weights(job)
        # While the frozen model runs, there are logits of the trained one, but the rest of its loss is not yet there.
        before_loss = max(0.0, loss - vocabulary * job.tokens * job.width)
        weights += frozen.held + max(0.0, frozen.passing - passing - before_loss)
    activations = kept + max((blocks[kind][1] for kind in kinds), default=0.0) + bool(heads and model.ahead) * again_ahead
    if kept_gradients and footprint.kept_gradient and not job.buffers_all_gradients:
        if job.reduces_experts_late:
            buffer = footprint.kept_gradient * job.trained * sum(routed for _, routed in counts)
            has_parts = job.zero == 3 and job.reduces_often  # before the buffer is made
            kept_gradients = kept_gradients + buffer if has_parts else max(kept_gradients, buffer)
        kept_gradients = max(kept_gradients, footprint.kept_gradient * job.trained * _largest_parameter(job, stages))
    gradients += max(0.0, kept_gradients - activations - loss)  # they are made when the activations are gone
    other = (footprint.allocator - 1) * (activations + loss) + footprint.context
    return Memory(weights, gradients, optimizer, activations, loss, other)


def _travelling_bytes(job: Job) -> float:
    """Bytes of one micro-batch that each stage keeps of the embedding that travels to modules of multi-token prediction."""
    return job.tokens * job.model.hidden * job.width if job.model.ahead and job.layout.pp > 1 else 0.0


def _ahead_bytes(job: Job) -> tuple[float, float]:
    """Bytes of one micro-batch that a module of multi-token prediction (keeps, recomputes) besides its block and logits: the inputs of
    three norms, of the joining matrix (twice as wide) and of the head, and what norms keep that are not fused. Recomputed, it keeps the
    embedding and the input of the head."""
    split = job.layout.tp if job.sequence_parallel else 1
    row, unfused = job.width * job.model.hidden, 3 * _unfused(job) * job.model.hidden
    whole, least = job.tokens * (row + (5 * row + unfused) / split), job.tokens * (row + row / split)
    if job.recompute != "full":
        return whole, 0.0
    return least / job.recompute_every + whole * (1 - 1 / job.recompute_every), whole - least


def _unfused(job: Job) -> float:
    """Bytes that a norm keeps of a number besides its input and output: none where a compiler fuses it."""
    if job.stack.compiled:
        return 0.0
    return job.stack.footprint.saved / 2 + (job.model.kept.norm if job.stack.transformers else 0.0)


def _largest_parameter(job: Job, stages: Sequence[Stage]) -> float:
    """Count the elements of the largest parameter of some stages on a rank. Its gradient is there twice while a bucket takes a copy of it,
    before the rank has room for what it keeps (`parallel/zero/gradient_buffers.py`; `tests/planner/test_gradient_memory.py`)."""
    model, layout = job.model, job.layout
    sizes = [model.embedding / layout.tp] if any(stage.embedding or stage.head for stage in stages) else []
    for index, kind in enumerate(model.kinds):
        if any(stage.counts[index] for stage in stages):
            sizes += [matrix.size / layout.tp for matrix in model.attention if matrix.sharded_by != "none"]
            split = layout.ep if layout.ep > 1 else layout.tp
            experts = model.experts * (2 if model.gated else 1) * model.expert_ffn * model.hidden / split
            sizes.append(experts if kind.mixture else model.ffn * model.hidden / layout.tp)
    return max(sizes, default=0.0)


def kept_by_block(job: Job, kind: Kind) -> float:
    """Bytes of one micro-batch that a block keeps for its backward pass."""
    model, layout = job.model, job.layout
    whole = block_activations(job, kind)
    if job.recompute == "none":
        return whole
    if job.recompute == "full":
        least = 2 * job.tokens * model.hidden / (layout.tp if job.sequence_parallel else 1)
    else:
        core = 2 * (model.query_width + model.key_width) + _score_bytes(job) * model.heads * job.seq
        least = job.stack.selective_bytes(whole, job.tokens * core / layout.tp / 2)
    return least / job.recompute_every + whole * (1 - 1 / job.recompute_every)


def block_activations(job: Job, kind: Kind) -> float:
    """Bytes of one micro-batch that a block without recomputation keeps."""
    model, layout, footprint, width = job.model, job.layout, job.stack.footprint, job.width
    family = model.kept if job.stack.transformers else Kept()
    fused = job.stack.compiled
    experts_fused = fused and layout.ep == 1  # those of other ranks run outside of the compiled graphs
    unfused = _unfused(job)
    split = layout.tp if job.sequence_parallel else 1
    whole = kind.mixture and layout.ep == 1  # every tensor-parallel rank has all tokens, and a part of each expert
    norms = 2 if not fused or split == 1 else int(kind.mixture and not whole)  # outputs that are kept; a compiler norms again
    shared = (2 + norms) * model.hidden * width / split + 2 * unfused * model.hidden / layout.tp + (2 * width + unfused) * model.latent
    attention = width * (2 * model.query_width + model.expanded) + 4 * model.heads + (width + unfused) * model.normed
    attention += _of_scores(job) + job.stack.attention_saved(model.key_width)
    inner, saved_inner = model.ffn, 0.0 if fused else footprint.saved_inner
    if kind.mixture:  # experts are sharded, or the tokens are split before they are sent
        inner, saved_inner = model.top_k * model.expert_ffn + model.shared_ffn, 0.0 if experts_fused else footprint.saved_inner
        attention += 0.0 if experts_fused else family.inner * model.top_k * model.expert_ffn
        attention += 0.0 if fused else family.routed * model.hidden
        shared += 2 * width * model.top_k * model.hidden / (1 if whole else layout.tp)  # inputs of experts and their outputs
        shared += 0.0 if fused or not whole else width * model.hidden * (1 - 1 / split)  # the gathered input
    of_inner = (3 if model.gated else 2) * width + saved_inner
    return job.tokens * (shared + (attention + of_inner * inner) / layout.tp)


def _of_scores(job: Job) -> float:
    """Bytes of a token that attention keeps of its keys, values and scores. Without a fused kernel, Transformers has keys for each head."""
    model, repeats = job.model, job.stack.transformers and not job.stack.flash
    return job.width * (2 * model.query_width if repeats else model.key_width) + _score_bytes(job) * model.heads * job.seq


def _score_bytes(job: Job) -> float:
    """Bytes of a score that attention keeps: none with a fused kernel, else in Megatron softmax, dropout's mask and its output."""
    if job.stack.flash:
        return 0.0
    return job.model.kept.score if job.stack.transformers else 5.0
