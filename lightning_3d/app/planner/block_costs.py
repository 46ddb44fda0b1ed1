"""Seconds of the parts of a model on one rank, for one micro-batch: products, attention,
element-wise operations, communication.

Each part costs operations / rate + bytes / bandwidth + a constant, a smooth form of the roofline
(Williams et al., 2009, doi:10.1145/1498765.1498785): small or narrow products are slow because
their bytes and their start weigh more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import comb
from typing import Any

from lightning_3d.app.planner.architecture import Architecture, BlockKind, WeightMatrix
from lightning_3d.app.planner.frozen import alone
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.machine import (
    Group,
    Machine,
    all_reduce,
    gather,
    reduce_scatter,
    send,
)

_WORD = 4
"""Bytes of a number in 32 bits."""

_LOSS_FORWARD, _SHARDED_LOSS_FORWARD = 14 / 36, 30 / 66
"""Shares of the loss's traffic in its forward pass, of `Traffic.logit` and `Traffic.sharded_logit`
of this package."""


@dataclass(frozen=True)
class CostPart:
    """Seconds of one part of the model: computation and exposed communication, forward and
    backward.

    `weights` is the share of the backward for gradients of weights (zero-bubble schedules run it
    later, arXiv:2401.10241). `again` and `again_communication` are the shares of `backward` and
    `backward_communication` that repeat the forward (recomputation).
    """

    forward: float = 0.0
    backward: float = 0.0
    weights: float = 0.0
    forward_communication: float = 0.0
    backward_communication: float = 0.0
    again: float = 0.0
    again_communication: float = 0.0

    def __add__(self, other: CostPart) -> CostPart:
        return CostPart(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weights + other.weights,
            self.forward_communication + other.forward_communication,
            self.backward_communication + other.backward_communication,
            self.again + other.again,
            self.again_communication + other.again_communication,
        )

    def __mul__(self, times: float) -> CostPart:
        return CostPart(
            times * self.forward,
            times * self.backward,
            times * self.weights,
            times * self.forward_communication,
            times * self.backward_communication,
            times * self.again,
            times * self.again_communication,
        )

    def recomputed_twice(self) -> CostPart:
        """Return the part where gradients of weights have a pass of their own, which repeats the
        forward again."""
        return replace(
            self,
            backward=self.backward + self.again,
            weights=self.weights + self.again + self.again_communication,
            backward_communication=self.backward_communication + self.again_communication,
        )

    def halved(self, times: float) -> CostPart:
        """Return the part where the backward in two halves takes `times` as long as a whole one."""
        return replace(self, backward=times * self.backward, weights=times * self.weights)

    def seconds(self) -> tuple[float, ...]:
        return (
            self.forward,
            self.backward,
            self.weights,
            self.forward_communication,
            self.backward_communication,
        )


@dataclass(frozen=True)
class BlockWork:
    """Seconds of all work of a job's ranks for one micro-batch.

    Attributes:
        blocks: one block of each kind (`Architecture.kinds`).
        embedding: embedding look-up.
        head: final norm, output head and loss; again for each module of multi-token prediction,
            with the matrix in front of its block. Also the forward of a frozen second model, which
            is on the same ranks.
        message: one tensor between two stages.
        host_block: seconds that the host needs to start a block, forward and backward together.
        stages: room for what is computed from the rest, by stage (`step_time.py`). Jobs with the
            same blocks, embedding and head share it.
    """

    blocks: tuple[CostPart, ...]
    embedding: CostPart
    head: CostPart
    message: float
    host_block: float
    stages: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def of(self, counts: Iterable[int]) -> CostPart:
        """Return the seconds of so many blocks of each kind."""
        parts = zip(self.blocks, counts, strict=True)
        return sum((part * count for part, count in parts if count), CostPart())


def work_of(job: Job, machine: Machine) -> BlockWork:
    """Predict the work of a job's ranks for one micro-batch."""
    head = _head(job, machine) * (1 + job.model.ahead) + _ahead(job, machine)
    return BlockWork(
        blocks=tuple(_recomputed(job, machine, kind) for kind in job.model.kinds),
        embedding=_embedding(job, machine),
        head=head + _frozen(job, machine),
        message=message_seconds(job, machine),
        host_block=job.stack.host_seconds(job.layout, machine),
    )


def message_seconds(job: Job, machine: Machine) -> float:
    """Predict the seconds in which one tensor of a micro-batch passes from stage to stage."""
    if job.layout.pp == 1:
        return 0.0
    row = job.model.hidden * job.width
    # the embedding travels with the hidden states to the last stage
    ahead = job.tokens if job.model.ahead else 0.0
    if job.sequence_parallel:
        return send(machine, job.layout, (job.tokens / job.layout.tp + ahead) * row)
    whole = (job.tokens + ahead) * row
    if not job.stack.scatters_messages:
        return send(machine, job.layout, whole)
    return send(machine, job.layout, whole / job.layout.tp) + gather(
        machine, machine.group(job.layout, ("tp",)), whole
    )


def _frozen(job: Job, machine: Machine) -> CostPart:
    """Predict the forward of a frozen second model. The host starts its kernels, too, a third of
    those of both passes."""
    second = alone(job)
    if second is None:
        return CostPart()
    work = work_of(second, machine)
    whole = work.of(second.model.counts) + work.embedding + work.head
    host = work.host_block * second.model.layers / 3
    waits = (
        host
        if job.stack.host.computes
        else max(0.0, host - whole.forward - whole.forward_communication)
    )
    return CostPart(
        forward=whole.forward + waits, forward_communication=whole.forward_communication
    )


def _ahead(job: Job, machine: Machine) -> CostPart:
    """Predict what modules of multi-token prediction have in addition to their blocks and heads:
    the matrices that join embeddings and hidden states, and one exchange of the tokens behind each
    chunk of a context-parallel rank (`parallel/context/following.py`)."""
    model, layout = job.model, job.layout
    part = products(job, machine, [model.joining], job.tokens) * model.ahead
    if model.ahead == 0 or layout.cp == 1:
        return part
    edges = 2 * layout.cp * model.ahead * job.micro_batch
    once = gather(machine, machine.group(layout, ("cp",)), edges * model.hidden * job.width)
    return part + CostPart(forward_communication=once, backward_communication=once)


def products(
    job: Job, machine: Machine, matrices: Iterable[WeightMatrix], tokens: float
) -> CostPart:
    """Predict matrix products of `tokens` tokens with matrices that tensor parallelism shards."""
    return _products(job, machine, matrices, tokens, job.precision)


def _expert_products(
    job: Job, machine: Machine, matrices: Sequence[WeightMatrix], rows: float, experts: int
) -> CostPart:
    """Predict matrix products of `rows` rows, which are divided among `experts` experts with such
    matrices."""
    precision = job.expert_precision
    sizes = [size for matrix in matrices for size in matrix.local(job.layout.tp)]
    starts = job.stack.expert_starts(experts, precision, sizes, machine)
    return _products(job, machine, matrices, rows, precision, experts, starts)


def _products(
    job: Job,
    machine: Machine,
    matrices: Iterable[WeightMatrix],
    tokens: float,
    precision: str,
    copies: int = 1,
    starts: int = 1,
) -> CostPart:
    """Predict matrix products in a precision with `copies` of matrices, `starts` of which start one
    after the other."""
    rate, bandwidth, kernel = (
        machine.matmul_rate(precision),
        machine.memory_rate,
        machine.efficiency.kernel,
    )
    width = {"fp8": 1.0, "fp4": 0.5, "fp32": 4.0}.get(precision, job.width)
    forward = inputs = weights = 0.0
    for matrix in matrices:
        outputs, depth = matrix.local(job.layout.tp)
        work = 2.0 * tokens * outputs * depth / rate
        activations = width * tokens * (outputs + depth) / bandwidth
        size = copies * outputs * depth / bandwidth
        forward += work + activations + width * size + starts * kernel
        inputs += work + activations + width * size + starts * kernel
        weights += work + activations + 2 * job.stack.footprint.gradient * size + starts * kernel
    weights *= job.trained
    return CostPart(forward=forward, backward=inputs + weights, weights=weights)


def _attention(job: Job, machine: Machine, kind: BlockKind) -> CostPart:
    """Predict scores and values of one block. With a causal mask half of the products are needed; a
    backward pass has 2.5 times as many (FlashAttention-2, arXiv:2307.08691, section 3.1). Without a
    fused kernel the scores are written and read (`Stack.score_bytes`). A causal mask saves no
    products there (arXiv:2205.05198, section 4)."""
    layout, model = job.layout, job.model
    width = model.query_width / job.attention_tp
    context = model.context(job.seq, kind)
    if job.stack.flash:
        forward = 4.0 * job.tokens * context * width / job.stack.attention_rate(machine)
        part = CostPart(forward=forward, backward=2.5 * forward)
    else:
        scores = job.tokens * job.seq * model.heads / job.attention_tp / machine.memory_rate
        work = (
            4.0 * job.tokens * job.seq * width / machine.matmul_rate(job.stack.attention_precision)
        )
        forward, backward = job.stack.score_bytes
        part = CostPart(forward=work + forward * scores, backward=2 * work + backward * scores)
    if layout.cp > 1:
        kv = gather(
            machine,
            machine.group(layout, ("cp",)),
            job.tokens * layout.cp * model.key_width / job.attention_tp * job.width,
        )
        forward, backward = (
            (part.forward, part.backward) if job.stack.overlap.blocks else (0.0, 0.0)
        )
        part += CostPart(
            forward_communication=max(0.0, kv - forward),
            backward_communication=max(0.0, 2 * kv - backward),
        )
        # results of a round join those before
        merged = (layout.cp - 1) * 3 * _WORD * job.tokens * width / machine.memory_rate
        part += CostPart(forward=merged, backward=merged)
    return part


def _elementwise(job: Job, machine: Machine, inner: float) -> CostPart:
    """Predict norms, residual sums, rotation of queries and keys, and the activation of an MLP of
    local inner width `inner`.

    Numbers read and written: a norm 2 h, a sum 3 h, both multiplied by `Traffic.between`; rotation
    2 (queries + keys), an activation with gate 3 inner widths, both multiplied by `Traffic.inside`.
    """
    model = job.model
    shared = model.hidden / (job.layout.tp if job.sequence_parallel else 1)
    rotated = _rotated(job)
    gates = 3 if model.gated else 2
    times = job.stack.traffic
    traffic = (
        job.width
        * job.tokens
        * (
            times.of_norms * 10 * shared
            + times.inside(job.layout.tp) * (2 * rotated + gates * inner)
        )
    )
    if job.precision in ("fp8", "fp4"):
        # casts of the inputs of products
        traffic += 3 * job.tokens * (2 * model.hidden + rotated + inner)
    forward = traffic / machine.memory_rate
    return CostPart(forward=forward, backward=2 * forward)


def _rotated(job: Job) -> float:
    """Count the numbers of a token's queries and keys on a rank."""
    return (job.model.query_width + job.model.key_width / 2) / job.attention_tp


def _tensor_parallel(job: Job, machine: Machine, kind: BlockKind) -> CostPart:
    """Predict the messages of tensor-parallel ranks of one block: a pair for attention and a pair
    for its MLP.

    Experts that expert parallelism distributes need no pair: a rank sends its part of the tokens to
    them (with sequence parallelism that which it has; `_is_expert_parallel` in
    parallel/tensor/sequence_parallel.py, and `MoELayer.forward` of Megatron Core,
    moe/moe_layer.py). Without sequence parallelism ranks gather what has come back, forward, and
    its gradient, backward (`TokenParts` in parallel/tensor/experts.py). A sharded shared expert has
    a pair.
    """
    if not kind.mixture or job.layout.ep == 1:
        return _pairs(job, machine, 2)
    shared = bool(job.model.shared_ffn) and not job.model.whole_shared
    part = _pairs(job, machine, 1 + shared)
    if job.sequence_parallel:
        return part
    _, _, gathered = _hidden_states(job, machine)
    return part + CostPart(forward_communication=gathered, backward_communication=gathered)


def _pairs(job: Job, machine: Machine, count: int) -> CostPart:
    """Predict `count` all-reduces of (batch, seq, hidden) forward and as many backward, or as many
    pairs of all-gather and reduce-scatter. With sequence parallelism the inputs of products are
    gathered once more in the backward pass (arXiv:2205.05198, section 4.2.2)."""
    summed, scattered, gathered = _hidden_states(job, machine)
    if not job.sequence_parallel:
        return CostPart(forward_communication=count * summed, backward_communication=count * summed)
    return CostPart(
        forward_communication=count * (gathered + scattered),
        backward_communication=count * (2 * gathered + scattered),
    )


def _hidden_states(job: Job, machine: Machine) -> tuple[float, float, float]:
    """Predict the exposed seconds in which tensor-parallel ranks (all-reduce, scatter, gather) the
    hidden states of a micro-batch.

    Scattered and gathered ones are copied, once each: gathered parts of a sequence are side by side
    in its row, not one behind the other.
    """
    if job.layout.tp == 1:
        return 0.0, 0.0, 0.0
    ranks, size = machine.group(job.layout, ("tp",)), job.tokens * job.model.hidden * job.width
    copied = (
        2 * size / machine.memory_rate
        if job.stack.batch_first and job.calls * job.micro_batch > 1
        else 0.0
    )
    waited = job.stack.overlap.layers
    return (
        all_reduce(machine, ranks, size) * waited,
        reduce_scatter(machine, ranks, size) * waited + copied,
        gather(machine, ranks, size) * waited + copied,
    )


def _mixture(job: Job, machine: Machine) -> CostPart:
    """Predict router, shared experts, token exchange and routed experts of one block: top_k copies
    of each token are sent and come back (arXiv:2006.16668, section 2.2)."""
    model, layout = job.model, job.layout
    sharded = job.stack.shards_experts_of(layout)
    local = max(1, model.experts * (layout.tp if sharded and layout.ep > 1 else 1) // layout.ep)
    rows = job.tokens * model.top_k
    # experts are whole, and tokens of a tensor-parallel group are shared before they are sent
    if not sharded:
        rows /= layout.tp
        unsharded = tuple(
            WeightMatrix(matrix.outputs, matrix.inputs, "none")
            for matrix in model.mlp(model.expert_ffn)
        )
        part = _expert_products(job, machine, unsharded, rows, local)
        inner: float = model.expert_ffn * rows / job.tokens
    else:
        part = _expert_products(job, machine, model.mlp(model.expert_ffn), rows, local)
        inner = model.expert_ffn * model.top_k / layout.tp
    shared = (
        products(job, machine, model.shared_mlp(), job.tokens) if model.shared_ffn else CostPart()
    )
    moved = 4 * rows * model.hidden * job.width / machine.memory_rate  # permutation there and back
    sent = job.tokens / layout.tp if layout.ep > 1 else job.tokens
    part += (
        shared
        + CostPart(forward=moved, backward=2 * moved)
        + _token_exchange(job, machine, sent, shared)
    )
    return part + _elementwise(job, machine, inner)


def _token_exchange(job: Job, machine: Machine, tokens: float, shared: CostPart) -> CostPart:
    """Predict the exposed exchange of tokens with the ranks that have their experts, there and
    back, forward and backward.

    The first way there, and in the backward the last one, is hidden behind the shared expert.

    Args:
        tokens: tokens that this rank sends.
        shared: the shared expert.
    """
    model, ranks = job.model, expert_group(job, machine)
    row = tokens * model.hidden * job.width
    several = ranks.nodes > 1 and ranks.size % ranks.local == 0
    crossing = nodes_of_a_token(model, ranks.nodes) * row if several else None
    first, inside = job.stack.exchange_seconds(
        machine, ranks, model.top_k * row, crossing, job.layout.tp
    )
    return CostPart(
        forward_communication=2 * (first + inside) - min(first, shared.forward),
        backward_communication=2 * (first + inside) - min(first, shared.backward),
    )


def nodes_of_a_token(model: Architecture, nodes: int) -> float:
    """Return the expected number of nodes on which a token has experts, if all choices are equally
    likely: of `top_groups` groups, and of experts in them (node-limited routing, arXiv:2412.19437,
    section 2.1.2). Neighbouring groups are on one node."""
    size = model.experts // model.groups
    pool = size * model.top_groups
    here = max(1, model.groups // nodes)  # groups that a node has, or has a part of
    part = min(size, model.experts // nodes)  # experts of a group on a node
    missed = 0.0
    for chosen in range(
        max(0, model.top_groups - (model.groups - here)), min(here, model.top_groups) + 1
    ):
        likely = (
            comb(here, chosen)
            * comb(model.groups - here, model.top_groups - chosen)
            / comb(model.groups, model.top_groups)
        )
        missed += likely * comb(pool - chosen * part, model.top_k) / comb(pool, model.top_k)
    return nodes * (1 - missed)


def expert_group(job: Job, machine: Machine) -> Group:
    """Return the ranks that share the experts of a stage."""
    return machine.expert_groups(job.layout, job.layout.dp)[0]


def _block(job: Job, machine: Machine, kind: BlockKind) -> CostPart:
    """Predict a block without recomputation."""
    model = job.model
    part = (
        products(job, machine, model.attention, job.tokens)
        + _attention(job, machine, kind)
        + _tensor_parallel(job, machine, kind)
    )
    if kind.mixture:
        return part + _mixture(job, machine)
    return (
        part
        + products(job, machine, model.mlp(model.ffn), job.tokens)
        + _elementwise(job, machine, model.ffn / job.layout.tp)
    )


def _recomputed(job: Job, machine: Machine, kind: BlockKind) -> CostPart:
    """Predict a block with recomputation, averaged over blocks: the backward pass of one in
    `recompute_every` repeats a part of its forward."""
    block = _block(job, machine, kind)
    if job.recompute == "full":
        repeated, communicated = block.forward, block.forward_communication
    elif job.recompute == "selective":
        repeated, communicated = _selected(job, machine, kind), 0.0
    else:
        return block
    again = CostPart(
        backward=repeated,
        again=repeated,
        backward_communication=communicated,
        again_communication=communicated,
    )
    return block + again * (1 / job.recompute_every)


def _selected(job: Job, machine: Machine, kind: BlockKind) -> float:
    """Return the forward seconds of what `recompute=selective` repeats. Ours: the element-wise
    operations of a block and attention without a fused kernel, but nothing of mixtures that
    exchange tokens and of attention that shares out sequences (`EXPENSIVE` in
    `parallel/blocks/recompute.py`). Other software: attention without its projections, which are
    rotation, scores and values."""
    attention = _attention(job, machine, kind).forward
    inner = (
        job.model.expert_ffn * job.model.top_k if kind.mixture else job.model.ffn
    ) / job.layout.tp
    if job.stack.transformers:
        exchanged = kind.mixture and job.layout.ep > 1
        # no recomputation needs the last residual sum
        last = 3 * job.model.hidden / (job.layout.tp if job.sequence_parallel else 1)
        again = _elementwise(job, machine, 0.0 if exchanged else inner).forward
        again -= job.width * job.tokens * job.stack.traffic.of_norms * last / machine.memory_rate
        return again + (0.0 if job.stack.flash or job.layout.cp > 1 else attention)
    if job.stack.repeats_block:
        return attention + _elementwise(job, machine, inner).forward
    return (
        attention
        + job.width
        * job.tokens
        * job.stack.traffic.inside(job.layout.tp)
        * 2
        * _rotated(job)
        / machine.memory_rate
    )


def _embedding(job: Job, machine: Machine) -> CostPart:
    """Predict the embedding: rows are read and written, and the backward pass adds to the
    gradient's rows. Tensor-parallel ranks, each with a part of the vocabulary, sum what they have
    found; with sequence parallelism they gather the gradient of their parts."""
    rows = 2 * job.width * job.tokens * job.model.hidden / machine.memory_rate
    summed, scattered, gathered = _hidden_states(job, machine)
    part = CostPart(forward=rows, backward=2 * rows)
    if not job.sequence_parallel:
        return part + CostPart(forward_communication=summed)
    return part + CostPart(
        forward_communication=scattered if job.stack.scatters_embedding else summed,
        backward_communication=gathered,
    )


def _loss(job: Job, machine: Machine) -> CostPart:
    """Predict the loss, whose passes over the logits are bound by memory."""
    moved, forward = job.stack.traffic.logit, _LOSS_FORWARD
    if job.layout.tp > 1 and job.stack.traffic.sharded_logit is not None:
        moved, forward = job.stack.traffic.sharded_logit, _SHARDED_LOSS_FORWARD
    seconds = job.tokens * job.model.vocab / job.layout.tp * moved / machine.memory_rate
    return CostPart(forward=seconds * forward, backward=seconds * (1 - forward))


def _bytes_of_summed_products(job: Job) -> int:
    """Bytes that a loss in parts moves for each element of the head's weight, beyond those of one
    product: each product is added to the gradient of the weight in float32, which is converted at
    the end. A product in float32 is added without being written."""
    if job.loss_products == 1:
        return 0
    return (
        job.loss_products * 2 * (_WORD + job.width)
        if job.width < _WORD
        else (job.loss_products - 1) * 2 * _WORD
    )


def _head(job: Job, machine: Machine) -> CostPart:
    """Predict the output head, sharded by vocabulary, and the loss. Tensor-parallel ranks sum the
    gradient of its input; with sequence parallelism they gather that input first."""
    model = job.model
    head = products(job, machine, (WeightMatrix(model.vocab, model.hidden),), job.tokens)
    part = head + _loss(job, machine)
    part += CostPart(
        forward=_bytes_of_summed_products(job)
        * model.vocab
        / job.layout.tp
        * model.hidden
        / machine.memory_rate
    )
    summed, _, gathered = _hidden_states(job, machine)
    return part + CostPart(
        forward_communication=gathered if job.sequence_parallel else 0.0,
        backward_communication=summed,
    )
