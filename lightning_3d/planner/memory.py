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
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from lightning_3d.layout.schedules import find_schedule, stages_of_rank
from lightning_3d.models.spec import Kept
from lightning_3d.planner.architecture import Kind
from lightning_3d.planner.frozen import frozen_weights
from lightning_3d.planner.job import Job
from lightning_3d.planner.stages import Stage, one_block, parameters_of, shard_ranks, split_stages, stages_of
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
    memory = memory_within(job, inf)
    assert memory is not None
    return memory


def memory_within(job: Job, room: float) -> Memory | None:
    """Return the memory of the rank that needs most; None, as soon as it is known, if a rank needs more than `room` bytes."""
    blocks, most = block_bytes(job), None
    for own in _fullest(stages_of(job), job.schedule, job.layout.pp, job.layout.vp, _enough(job)):
        memory = memory_of_rank(job, own, blocks)
        if memory.total > room:
            return None
        if most is None or memory.total > most.total:
            most = memory
    return most


@lru_cache(maxsize=1024)
def _fullest(all_stages: tuple[Stage, ...], schedule: str, pp: int, vp: int, micro_batches: int) -> tuple[StagesOfRank, ...]:
    """Return what `stages_in_flight` does, without ranks that have the same stages as another one and no more micro-batches in flight."""
    found: dict[tuple[Stage, ...], list[tuple[int, ...]]] = {}
    for own in _indices_in_flight(schedule, pp, vp, micro_batches):
        stages, live = tuple(all_stages[index] for index, _ in own), tuple(count for _, count in own)
        others = found.setdefault(stages, [])
        if not any(_covers(other, live) for other in others):
            others[:] = [*(other for other in others if not _covers(live, other)), live]
    return tuple(tuple(zip(stages, live, strict=True)) for stages, counts in found.items() for live in counts)


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
    return _indices_in_flight(job.schedule, job.layout.pp, job.layout.vp, _enough(job))


def _indices_in_flight(schedule: str, pp: int, vp: int, micro_batches: int) -> list[tuple[tuple[int, int], ...]]:
    live = in_flight(schedule, pp, vp, micro_batches)
    v_shaped = find_schedule(schedule).v_shaped and pp > 1
    ranks = [stages_of_rank(rank, pp, vp, v_shaped) for rank in range(pp)]
    return [tuple((index, live[rank].get(index, 0)) for index in own) for rank, own in enumerate(ranks)]


def least_memory(job: Job, levels: Sequence[str], *, balanced: bool = True) -> Iterator[tuple[str, float]]:
    """Yield for each level of recomputation a lower bound of the fullest rank's bytes for all schedules and ZeRO stages: all of its blocks,
    and as many micro-batches in flight as there are stages (1F1B's first rank; the other schedules keep as much or more).

    Args:
        balanced: whether stages have equal work; otherwise the rank with most blocks may have one micro-batch in flight.
    """
    share = _smallest_share(job)
    own, spare = ((share, min(job.micro_batches, job.layout.pp) if balanced else 1),), _spare_bytes(job, share)
    kinds = _kinds_of([share])
    lean = [(each, _held(each, [share], kinds)) for each in _leanest(job)]
    for level in levels:
        sizes = block_bytes(job.but(recompute=level))
        least = ((min(kept for kept, _ in sizes), min(temporary for _, temporary in sizes)),) * len(sizes)
        ways = (_with_activations(each.but(recompute=level), held, own, least, kinds).total for each, held in lean)
        yield level, min(ways) - spare


def least_held(job: Job) -> float:
    """Return a lower bound of the fullest rank's bytes for all schedules, ZeRO stages, micro-batches and levels of recomputation: its share
    of weights, gradients and optimizer state."""
    share = _smallest_share(job)
    held = (_held(each, [share], _kinds_of([share])) for each in _leanest(job))
    least = min(each.weights + each.gradients + each.optimizer for each in held)
    return least + job.stack.footprint.context - _spare_bytes(job, share)


def _leanest(job: Job) -> list[Job]:
    """Return the job with the ZeRO stages of which one needs the least memory. Which one depends on the model, because ZeRO shards experts
    over other numbers of ranks than the rest. Stage 0 needs less than stage 1 only if some parameters are on one rank alone."""
    whole = [job.but(zero=0)] if 1 in shard_ranks(job) else []
    return [*whole, job.but(zero=1), job.but(zero=2), job.but(zero=3), job.but(zero=3, gather="micro_batch", reduce="micro_batch")]


def _spare_bytes(job: Job, share: Stage) -> float:
    """Return the bytes of further copies of gradients, which a single data-parallel rank may not have."""
    return job.stack.footprint.spare_gradient * sum(parameters_of(job, share)) * (job.layout.dp * job.layout.cp == 1)


def _smallest_share(job: Job) -> Stage:
    """Return a stage with the blocks that have the fewest parameters, as many as an equal share, or as the first stage if that has fewer:
    the engine gives it fewer where the embedding is large."""
    model, alone = job.model, one_block(job)
    first = split_stages(job.stack.split, model, job.layout.pp)[0].blocks
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
    stages = [stage for stage, _ in own]
    kinds = _kinds_of(stages)
    return _with_activations(job, _held(job, stages, kinds), own, blocks, kinds)


def _kinds_of(stages: Sequence[Stage]) -> list[int]:
    """Return the kinds of blocks that some stages have, as indices into `Architecture.kinds`."""
    return [kind for kind in range(len(stages[0].counts)) if any(stage.counts[kind] for stage in stages)]


def _with_activations(job: Job, held: _Held, own: StagesOfRank, blocks: BlockBytes, kinds: Sequence[int]) -> Memory:
    """Return the memory of a rank that holds `held`, with what its micro-batches in flight keep."""
    footprint = job.stack.footprint
    activations, loss = _activation_bytes(job, own, blocks, kinds), _loss_bytes(job, own)
    gradients = held.gradients + max(0.0, held.late_gradients - activations - loss)  # they are made when the activations are gone
    other = (footprint.allocator - 1) * (activations + loss) + footprint.context
    weights = held.weights + (_frozen_bytes(job, kinds, loss) if any(stage.head for stage, _ in own) else 0.0)
    return Memory(weights, gradients, held.optimizer, activations, loss, other)


class _Held(NamedTuple):
    """Bytes that a rank holds whatever is in flight. `late_gradients`: what is made of gradients when the activations are gone."""

    weights: float
    gradients: float
    late_gradients: float
    optimizer: float


def _held(job: Job, stages: Sequence[Stage], kinds: Sequence[int]) -> _Held:
    """Return what the rank holds that has these stages, with blocks of these kinds."""
    footprint, trained = job.stack.footprint, job.trained
    known = {stage: parameters_of(job, stage) for stage in set(stages)}
    counts = [known[stage] for stage in stages]
    inner = [parameters_of(job, Stage(stage.counts, False, False)) for stage in stages] if job.saved_block_bytes else [(0.0, 0.0)]
    weights = gradients = late = optimizer = 0.0
    sums = (map(sum, zip(*numbers, strict=True)) for numbers in (counts, inner))
    early = job.reduces_often, job.reduces_often and not job.reduces_experts_late
    for parameters, of_blocks, ranks, often in zip(*sums, shard_ranks(job), early, strict=True):
        weights += parameters * job.weight_bytes / (ranks if job.zero == 3 else 1)
        at_end = footprint.gradient + footprint.spare_gradient
        gradients += parameters * trained * (footprint.gradient / ranks if often else at_end)
        if job.zero > 0 and not often:
            late += parameters * trained * footprint.kept_gradient / (1 if job.buffers_all_gradients else ranks)
        state = parameters * job.state_bytes - of_blocks * job.saved_block_bytes
        optimizer += trained * state / (ranks if job.zero >= 1 else 1)
    weights += _gathered_bytes(job, stages, counts, kinds) if job.zero == 3 else 0.0
    if late and footprint.kept_gradient and not job.buffers_all_gradients:
        if job.reduces_experts_late:
            buffer = footprint.kept_gradient * trained * sum(routed for _, routed in counts)
            has_parts = job.zero == 3 and job.reduces_often  # before the buffer is made
            late = late + buffer if has_parts else max(late, buffer)
        late = max(late, footprint.kept_gradient * trained * _largest_parameter(job, stages, kinds))
    return _Held(weights, gradients, late, optimizer)


def _gathered_bytes(job: Job, stages: Sequence[Stage], counts: Sequence[tuple[float, float]], kinds: Sequence[int]) -> float:
    """Return the bytes of the weights that ZeRO 3 has gathered at a time: all of them, or those of two blocks and the parts outside of
    blocks.

    Args:
        counts: (parameters, parameters of routed experts) of each stage.
    """
    if not job.gathers_often:
        return sum(map(sum, counts)) * job.weight_bytes
    ends = any(stage.embedding or stage.head for stage in stages)
    return _passing_bytes(job, kinds) + ends * job.model.embedding / job.layout.tp * job.weight_bytes


def _passing_bytes(job: Job, kinds: Sequence[int]) -> float:
    """Return the bytes of two blocks, if ZeRO 3 gathers them one at a time."""
    if not job.gathers_often:
        return 0.0
    alone = one_block(job)
    return 2 * max((sum(parameters_of(job, alone[kind])) for kind in kinds), default=0.0) * job.weight_bytes


def _frozen_bytes(job: Job, kinds: Sequence[int], loss: float) -> float:
    """Return the bytes of a frozen second model that come to those of the peak. While it runs, there are logits of the trained one, but the
    rest of its loss is not yet there."""
    frozen = frozen_weights(job)
    before_loss = max(0.0, loss - job.model.vocab / job.layout.tp * job.tokens * job.width)
    return frozen.held + max(0.0, frozen.passing - _passing_bytes(job, kinds) - before_loss)


def _activation_bytes(job: Job, own: StagesOfRank, blocks: BlockBytes, kinds: Sequence[int]) -> float:
    """Return the bytes of what the micro-batches in flight keep, and of what one block recomputes."""
    kept = sum(live * sum(count * keeps for count, (keeps, _) in zip(stage.counts, blocks, strict=True)) for stage, live in own)
    again = max((blocks[kind][1] for kind in kinds), default=0.0)
    if not job.model.ahead:
        return kept + again
    of_ahead, again_ahead = _ahead_bytes(job)
    kept += sum(live * (_travelling_bytes(job) + stage.head * job.model.ahead * of_ahead) for stage, live in own)
    return kept + again + any(stage.head for stage, _ in own) * again_ahead


def _loss_bytes(job: Job, own: StagesOfRank) -> float:
    """Return the bytes of logits and loss, on ranks with an output head."""
    heads = sum(stage.head for stage, _ in own)
    if not heads:
        return 0.0
    model, parts = job.model, job.loss_parts
    vocabulary = model.vocab / job.layout.tp
    loss = heads * vocabulary * job.tokens / parts * job.stack.logit_bytes(job.micro_batches)
    if parts == 1:  # while one head has its backward, the others keep what theirs needs
        return loss + heads * model.ahead * vocabulary * job.tokens * _LOG_SOFTMAX
    # The gradient of the head's weight: its sum in float32, and one for each micro-batch whose backward is to come.
    return loss + vocabulary * model.hidden * sum(4 + job.width * count * (1 + model.ahead) for stage, count in own if stage.head)


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


def _largest_parameter(job: Job, stages: Sequence[Stage], kinds: Sequence[int]) -> float:
    """Count the elements of the largest parameter of some stages on a rank. Its gradient is there twice while a bucket takes a copy of it,
    before the rank has room for what it keeps (`parallel/zero/gradient_buffers.py`; `tests/planner/test_gradient_memory.py`)."""
    model, layout = job.model, job.layout
    sizes = [model.embedding / layout.tp] if any(stage.embedding or stage.head for stage in stages) else []
    sizes += [model.largest_attention / layout.tp] if kinds else []
    for kind in kinds:
        split = layout.ep if layout.ep > 1 else layout.tp
        experts = model.experts * (2 if model.gated else 1) * model.expert_ffn * model.hidden / split
        sizes.append(experts if model.kinds[kind].mixture else model.ffn * model.hidden / layout.tp)
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
