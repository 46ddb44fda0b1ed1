"""Bytes that blocks keep of a micro-batch for its backward pass, and those that they recompute
meanwhile. Pure Python.

Of a block and a token, with hidden size h, queries q, keys and values k, inner width f, a heads, s
tokens, t tensor-parallel ranks (Korthikanti et al., arXiv:2205.05198, section 4, for a gated MLP
and grouped-query attention instead of GPT's):

    8 h       inputs of two norms and of what follows them; / t with sequence parallelism
    (4 q + 2 k + 4 a) / t    queries, keys, values, output and log-sum-exp of attention; 5 a s / t more without a fused kernel
    6 f / t   gate, up and their product; 4 f / t without gate

Software that is not fused keeps more (`Footprint.saved`, `saved_inner`). Compiled blocks keep no
more, and with sequence parallelism only the inputs of the norms: 4 h / t instead of 8 h / t.
"""  # noqa: E501

from __future__ import annotations

from lightning_3d.app.planner.architecture import BlockKind
from lightning_3d.app.planner.job import Job
from lightning_3d.models.spec import Kept

BlockBytes = tuple[tuple[float, float], ...]
"""Bytes of a micro-batch that each kind of block (keeps, recomputes while its backward pass
runs)."""


def block_bytes(job: Job) -> BlockBytes:
    """Return the bytes of a micro-batch that each kind of block keeps and recomputes."""
    return tuple(_of_kind(job, kind) for kind in job.model.kinds)


def _of_kind(job: Job, kind: BlockKind) -> tuple[float, float]:
    """Return what a block keeps and recomputes: with full recomputation all of what it keeps
    otherwise (its input is not part of that: norms keep a copy in float32), with selective
    recomputation what is cheap."""
    whole = block_activations(job, kind)
    if job.recompute == "none":
        return whole, 0.0
    least = _least_kept(job, kind, whole)
    kept = least / job.recompute_every + whole * (1 - 1 / job.recompute_every)
    return kept, whole if job.recompute == "full" else _recomputed_at_once(job, kind, whole - least)


def _recomputed_at_once(job: Job, kind: BlockKind, cheap: float) -> float:
    """Return which of the `cheap` bytes of a block live together: all of them, or the most of a
    part where parts are recomputed one by one, because a backward frees those of its part before
    the next begins. Such parts are two norms, and attention or an MLP."""
    if not job.stack.transformers or not (job.layout.cp > 1 or _exchanges(job, kind)):
        return cheap
    norm = (
        job.tokens
        * unfused_norm(job)
        * job.model.hidden
        / (job.layout.tp if job.sequence_parallel else 1)
    )
    return min(cheap, max(norm, cheap - 2 * norm))


def _exchanges(job: Job, kind: BlockKind) -> bool:
    """Return whether a block sends tokens to experts of other ranks."""
    return kind.mixture and job.layout.ep > 1


def _least_kept(job: Job, kind: BlockKind, whole: float) -> float:
    """Return the bytes that a recomputed block keeps of the `whole` ones."""
    model, layout = job.model, job.layout
    if job.recompute == "full":
        return 2 * job.tokens * model.hidden / (layout.tp if job.sequence_parallel else 1)
    if job.stack.transformers:
        return min(whole, _kept_by_selection(job, kind))
    core = 2 * (model.query_width + model.key_width) + _score_bytes(job) * model.heads * job.seq
    return job.stack.selective_bytes(whole, job.tokens * core / layout.tp / 2)


def _kept_by_selection(job: Job, kind: BlockKind) -> float:
    """Bytes of one micro-batch that a block keeps with our `recompute=selective`: its input, the
    results of products and fused attention, and the sum behind attention
    (`parallel/blocks/kept_results.py`). Where experts exchange tokens or attention shares out
    sequences, the other parts of a block are recomputed one by one (`parts_of` in
    `parallel/blocks/recompute.py`), and outputs of norms are kept, too."""
    model, layout = job.model, job.layout
    split = layout.tp if job.sequence_parallel else 1
    normed = 2 * unfused_norm(job) * model.hidden / split  # of both norms, which are recomputed
    attention = _kept_by_attention(job) if layout.cp > 1 else _results_of_attention(job)
    if _exchanges(job, kind):
        return job.tokens * (attention + _kept_by_mlp(job, kind) - normed)
    # inputs of both norms; outputs where they are recomputed alone
    rows = 2 if layout.cp == 1 else 4
    return job.tokens * (
        rows * job.width * model.hidden / split + attention + _results_of_mlp(job, kind)
    )


def _results_of_attention(job: Job) -> float:
    """Bytes of a token that selective recomputation keeps of attention: results of its products but
    the last, and of a fused kernel."""
    *projections, last = job.model.attention
    results = sum(matrix.local(job.attention_tp)[0] for matrix in projections)
    if not job.stack.flash:
        return job.width * results
    return (
        job.width * (results + last.local(job.attention_tp)[1])
        + 4 * job.model.heads / job.attention_tp
    )


def _results_of_mlp(job: Job, kind: BlockKind) -> float:
    """Bytes of a token that selective recomputation keeps of an MLP, or of a mixture whose experts
    have all tokens. The products of experts are scaled by their weights, so that the last ones are
    kept, too."""
    model, tp = job.model, job.layout.tp
    gates = 2 if model.gated else 1
    if not kind.mixture:
        return job.width * gates * model.ffn / tp
    shared = model.shared_ffn / (1 if model.whole_shared else tp)
    return job.width * (
        gates * (model.top_k * model.expert_ffn / tp + shared) + model.top_k * model.hidden / tp
    )


def block_activations(job: Job, kind: BlockKind) -> float:
    """Bytes of one micro-batch that a block without recomputation keeps."""
    return job.tokens * (_kept_by_attention(job) + _kept_by_mlp(job, kind))


def _kept_by_attention(job: Job) -> float:
    """Bytes of a token that attention keeps."""
    model, width, unfused, tp = job.model, job.width, unfused_norm(job), job.attention_tp
    kept = (
        width * (2 * model.query_width + model.expanded)
        + 4 * model.heads
        + (width + unfused) * model.normed
    )
    kept += _of_scores(job) + job.stack.attention_saved(model.key_width)
    # the input of all tokens
    gathered = width * model.hidden if job.sequence_parallel and tp < job.layout.tp else 0.0
    return kept / tp + (2 * width + unfused) * model.latent + gathered


def _kept_by_mlp(job: Job, kind: BlockKind) -> float:
    """Bytes of a token that both norms of a block and its MLP or mixture keep."""
    model, layout, footprint, width = job.model, job.layout, job.stack.footprint, job.width
    family = model.kept if job.stack.transformers else Kept()
    fused, tp = job.stack.compiled, layout.tp
    # those of other ranks run outside of the compiled graphs
    experts_fused = fused and layout.ep == 1
    split = tp if job.sequence_parallel else 1
    # every tensor-parallel rank has all tokens, and a part of each expert
    whole = kind.mixture and layout.ep == 1
    # outputs that are kept; a compiler norms again
    norms = 2 if not fused or split == 1 else int(kind.mixture and not whole)
    shared = (
        (2 + norms) * model.hidden * width / split
        + 2 * unfused_norm(job) * model.hidden / split
        + _cast_inputs(job, kind)
    )
    gates: float = (3 if model.gated else 2) * (job.number if kind.mixture else width)
    if not kind.mixture:
        return shared + (gates + (0.0 if fused else footprint.saved_inner)) * model.ffn / tp
    # Experts are sharded, or the tokens are split before they are sent.
    gates += 0.0 if experts_fused else footprint.saved_inner
    shared += (0.0 if experts_fused else family.inner) * model.top_k * model.expert_ffn / tp
    shared += 0.0 if fused else family.routed * model.hidden / tp
    # inputs of experts and their outputs
    shared += 2 * job.number * model.top_k * model.hidden / (1 if whole else tp)
    # the gathered input
    shared += 0.0 if fused or not whole else width * model.hidden * (1 - 1 / split)
    return shared + gates * (
        model.top_k * model.expert_ffn / tp + model.shared_ffn / (1 if model.whole_shared else tp)
    )


def _cast_inputs(job: Job, kind: BlockKind) -> float:
    """Bytes of a token that a block keeps in addition with autocast: norms are in float32, also
    what they keep, and each product has a copy of its input in 16 bits. A compiler makes one copy
    for all."""
    if not job.autocast or job.stack.compiled:
        return 0.0
    readers = sum(
        matrix.inputs == job.model.hidden and matrix.sharded_by != "row"
        for matrix in job.model.attention
    )
    readers += 1 if kind.mixture else 1 + job.model.gated
    return job.width * readers * job.model.hidden


def _of_scores(job: Job) -> float:
    """Bytes of a token that attention keeps of its keys, values and scores. Without a fused kernel,
    Transformers has keys for each head."""
    model, repeats = job.model, job.stack.transformers and not job.stack.flash
    return (
        job.width * (2 * model.query_width if repeats else model.key_width)
        + _score_bytes(job) * model.heads * job.seq
    )


def _score_bytes(job: Job) -> float:
    """Bytes of a score that attention keeps: none with a fused kernel, else in Megatron softmax,
    dropout's mask and its output."""
    if job.stack.flash:
        return 0.0
    return job.model.kept.score if job.stack.transformers else 5.0


def unfused_norm(job: Job) -> float:
    """Bytes that a norm keeps of a number besides its input and output: none where a compiler fuses
    it."""
    if job.stack.compiled:
        return 0.0
    return job.stack.footprint.saved / 2 + (job.model.kept.norm if job.stack.transformers else 0.0)


def ahead_bytes(job: Job) -> tuple[float, float]:
    """Bytes of one micro-batch that a module of multi-token prediction (keeps, recomputes) besides
    its block and logits: the inputs of three norms, of the joining matrix (twice as wide) and of
    the head, and what norms keep that are not fused. Recomputed, it keeps the embedding and the
    input of the head."""
    split = job.layout.tp if job.sequence_parallel else 1
    row, unfused = job.width * job.model.hidden, 3 * unfused_norm(job) * job.model.hidden
    whole, least = (
        job.tokens * (row + (5 * row + unfused) / split),
        job.tokens * (row + row / split),
    )
    if job.recompute != "full":
        return whole, 0.0
    return least / job.recompute_every + whole * (1 - 1 / job.recompute_every), whole - least


def travelling_bytes(job: Job) -> float:
    """Bytes of one micro-batch that each stage keeps of the embedding that travels to modules of
    multi-token prediction."""
    return (
        job.tokens * job.model.hidden * job.width if job.model.ahead and job.layout.pp > 1 else 0.0
    )
