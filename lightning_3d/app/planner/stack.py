"""Constants of the software that trains, and the points at which other software differs. Pure
Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lightning_3d.app.planner.machine import Group, Machine, all_to_all
from lightning_3d.layout.balance import Cost, split_layers
from lightning_3d.layout.layout import Layout
from lightning_3d.options.experts import GROUPED_ROW_BYTES

Split = Callable[[Sequence[Cost], int, Cost, Cost], tuple[list[int], int]]
"""(costs of each block, stages, costs of the embedding, costs of the output head) -> (blocks of
each stage, index of the stage with the head)."""


def balanced(
    blocks: Sequence[Cost], stages: int, embedding: Cost, head: Cost
) -> tuple[list[int], int]:
    """Split blocks as the engine does: the largest work of a stage is as small as possible, then
    its parameters."""
    flops, parameters = zip(*blocks, strict=True)
    parts = split_layers(flops, parameters, stages, first_extra=embedding, last_extra=head)
    return [len(part) for part in parts], stages - 1


@dataclass(frozen=True)
class Host:
    """Seconds that the host needs to start kernels.

    Attributes:
        block: forward and backward of one block for a micro-batch. The default is 200 kernels of 7
            us, an estimate without a measurement; with 1 ms no median error of the published runs
            changes by 0.02 points.
        collectives: addition for each block that tensor parallelism shards.
        step: constant for each optimizer step.
        computes: the host's cores also do the work, as on a CPU: what takes time to start is added,
            and hides behind nothing.
    """

    block: float = 1.4e-3
    collectives: float = 0.0
    step: float = 0.0
    computes: bool = False


@dataclass(frozen=True)
class Traffic:
    """Bytes that operations bound by memory read and write.

    Attributes:
        elementwise: element-wise operations of a block, as a multiple of what fused ones move.
        between: the same of norms and residual sums, between the layers that tensor parallelism
            shards; None: as `elementwise`.
        sharded: (degree of tensor parallelism, `elementwise` with it), where caches make a
            difference.
        logit: one logit in the loss. The default is for a loss that is not known: between 6 for one
            in a single kernel and 36 for one with a kernel for each operation.
        sharded_logit: the same for a loss that tensor parallelism shards by vocabulary; None if it
            moves as much as any other.
        whole: of `parameter`, what a rank moves for all parameters of its stages also where ZeRO
            shards them.
        gathered: further bytes for each of these parameters where ranks gather them after the
            optimizer's step.
        parameter: one parameter in the optimizer's step. The default is what a fused AdamW in
            float32 moves: 16 read and 12 written, and 2 written for the weight in 16 bits.
    """

    elementwise: float = 1.5
    logit: float = 24.0
    sharded_logit: float | None = None
    parameter: float = 30.0
    whole: float = 0.0
    gathered: float = 0.0
    between: float | None = None
    sharded: tuple[tuple[int, float], ...] = ()

    def inside(self, tp: int) -> float:
        """Return `elementwise` of the layers that so many ranks shard."""
        return dict(self.sharded).get(tp, self.elementwise)

    @property
    def of_norms(self) -> float:
        """`between`, or `elementwise` in its place."""
        return self.elementwise if self.between is None else self.between


@dataclass(frozen=True)
class Footprint:
    """Bytes that the software holds in GPU memory.

    Attributes:
        gradient: accumulated gradient of a parameter.
        spare_gradient: further copy of that gradient during the backward pass.
        kept_gradient: reduced gradient of a parameter that a rank keeps at ZeRO stages 1 to 3,
            where whole gradients add up meanwhile.
        logit: one logit, over all copies that live at once.
        sharded_logit: the same where tensor parallelism shards the vocabulary; None if it is the
            same.
        kept_logit: of a logit, what the loss keeps until its backward pass, of each micro-batch in
            flight.
        kept_sharded_logit: the same where tensor parallelism shards the vocabulary.
        stepwise: gradients are made by the first backward pass of a step, that of each parameter
            arrives in the type of its weight before it is added to its sum, and ZeRO sends them in
            buckets. Otherwise, gradients live all the time.
        saved: per token and unit of hidden size, beyond what the backward pass of a block needs.
        saved_inner: per token and unit of an MLP's inner width, beyond what its backward pass
            needs.
        stepping: temporary bytes for each number of the parameter that the optimizer steps at stage
            0.
        context: CUDA, the buffers of collectives, and libraries.
        allocator: factor of the caching allocator on activations and loss.
    """

    gradient: float = 4.0
    spare_gradient: float = 0.0
    kept_gradient: float = 0.0
    logit: float = 8.0
    sharded_logit: float | None = None
    kept_logit: float = 0.0
    kept_sharded_logit: float = 0.0
    stepwise: bool = False
    saved: float = 0.0
    saved_inner: float = 0.0
    stepping: float = 0.0
    context: float = 0.0
    allocator: float = 1.0


@dataclass(frozen=True)
class Overlap:
    """Communication that runs while the GPU computes.

    Attributes:
        all_reduce: reduction of gradients at ZeRO stage 0, during the last backward pass.
        data: reduction of gradients at ZeRO stages 1 to 3, during the last backward pass.
        gather: gathering of parameters, during the first forward pass.
        layers: share of tensor-parallel communication that is waited for; 1 without overlap.
        blocks: messages of a block: parameters that ZeRO gathers and gradients that it reduces for
            every micro-batch, and keys and values that context-parallel ranks pass on.
    """

    all_reduce: bool = True
    data: bool = True
    gather: bool = True
    layers: float = 1.0
    blocks: bool = True


@dataclass(frozen=True)
class Stack:
    """Software that trains: facts that are the same for all models and layouts.

    The methods and properties are the points at which other software differs;
    `benchmarks/planner_accuracy/software.py` overrides them.

    Attributes:
        flash: attention is one kernel that keeps no scores.
        score_bytes: bytes that (forward, backward) move for a score of attention without a fused
            kernel. The default is a kernel each for mask, softmax and dropout of 16-bit scores,
            between two products, and twice as much backward.
        attention_precision: precision of its products, `bf16` or `fp32`.
        transformers: blocks are those of Transformers, which keep what their family does
            (`Architecture.kept`).
        compiled: blocks are compiled by `torch.compile`. It recomputes norms and the activation of
            an MLP, and so keeps neither `saved` nor `saved_inner` bytes, and with sequence
            parallelism no outputs of norms (`tests/planner/test_compiled_blocks.py`).
        batch_first: hidden states are (batch, sequence, hidden), so that sequence parallelism
            copies what it gathers, and what it will scatter, where the batch has several rows
            (`gather_tokens`, `scatter_tokens` in parallel/tensor/collectives.py).
        halves: seconds of the two halves of a split backward, as a multiple of those of a whole
            one, at least 1. They have the same operations, but the second half finds less in
            caches, and starts operations of its own.
    """

    flash: bool = True
    score_bytes: tuple[float, float] = (16.0, 32.0)
    transformers: bool = False
    compiled: bool = False
    batch_first: bool = False
    halves: float = 1.0
    attention_precision: str = "bf16"
    host: Host = field(default_factory=Host)
    traffic: Traffic = field(default_factory=Traffic)
    footprint: Footprint = field(default_factory=Footprint)
    overlap: Overlap = field(default_factory=Overlap)

    @property
    def split(self) -> Split:
        """Rule by which blocks are split into stages."""
        return balanced

    @property
    def reduced_bytes(self) -> float:
        """Bytes of a gradient that is sent."""
        return 4.0

    @property
    def scatters(self) -> bool:
        """True if ZeRO scatters gradients; otherwise it reduces all of them on every rank."""
        return True

    @property
    def scatters_messages(self) -> bool:
        """True if tensor-parallel ranks that all have the hidden states send a part each to the
        next stage, whose ranks gather them."""
        return False

    @property
    def scatters_embedding(self) -> bool:
        """True if sequence parallelism scatters the sum of what tensor-parallel ranks find in the
        embedding; otherwise all ranks get it."""
        return False

    @property
    def waits_for_stages(self) -> bool:
        """True if ZeRO 3 and ranks that have the same experts send gradients when the last backward
        of a stage is over."""
        return True

    @property
    def repeats_block(self) -> bool:
        """True if selective recomputation repeats all element-wise operations of a block, otherwise
        those inside attention."""
        return False

    def expert_precision(self, precision: str, weight_bytes: float) -> str:
        """Return the precision of the products of routed experts, which is that of their weights:
        float8 is for linear layers only (`engine/float8.py`), and autocast does not know grouped
        products, in one process neither.

        Args:
            precision: that of other products.
            weight_bytes: bytes of a parameter.
        """
        return "fp32" if precision == "fp32" or weight_bytes > 2 else "bf16"

    def expert_starts(
        self, experts: int, precision: str, sizes: Sequence[float], machine: Machine
    ) -> int:
        """Return the number of products of a rank's experts that start one after the other: 1 in a
        grouped product, if the GPU has a kernel for it, otherwise all (`choose_products` in
        parallel/expert/experts.py).

        Args:
            experts: experts of a rank.
            precision: that of their products.
            sizes: sizes of the rows of their weights on a rank.
            machine: the cluster.
        """
        aligned = all(2 * size % GROUPED_ROW_BYTES == 0 for size in sizes)
        return 1 if precision == "bf16" and aligned and machine.groups_products else experts

    def shards_experts_of(self, layout: Layout) -> bool:
        """Return whether tensor-parallel ranks share each expert. With ep, they have whole
        experts."""
        return layout.ep == 1 and layout.tp > 1

    def exchange_seconds(
        self, machine: Machine, ranks: Group, size: float, crossing: float | None, tp: int
    ) -> tuple[float, float]:
        """Return the seconds of tokens on their way to their experts: (between ranks, then inside a
        node).

        Over several nodes a token crosses once to each node on which it has experts, and is sent on
        to its experts there (`parallel/expert/nodes.py`).

        Args:
            machine: the cluster.
            ranks: those that share the experts of a stage.
            size: bytes that a rank sends to experts.
            crossing: bytes that it sends to nodes; None: the ranks are on one node, or on different
                numbers of ranks of each.
            tp: number of tensor-parallel ranks.
        """
        if crossing is None:
            return all_to_all(machine, ranks, size), 0.0
        between, inside = Group(ranks.nodes, 1, ranks.near), Group(ranks.local, ranks.local)
        return all_to_all(machine, between, crossing), all_to_all(machine, inside, size)

    def host_seconds(self, layout: Layout, machine: Machine) -> float:
        """Return the seconds that the host needs to start forward and backward of a block."""
        return self.host.block if layout.tp == 1 else self.host.block + self.host.collectives

    def attention_rate(self, machine: Machine) -> float:
        """Return the operations a second of fused attention."""
        return machine.peak_of(self.attention_precision) * machine.efficiency.attention

    def attention_saved(self, key_width: int) -> float:
        """Return the bytes that attention keeps of a token beyond what its backward pass needs.

        Args:
            key_width: width of keys and values together.
        """
        return 0.0

    def selective_bytes(self, whole: float, core: float) -> float:
        """Return the bytes that a block keeps with selective recomputation.

        Args:
            whole: bytes without recomputation.
            core: half of the bytes that attention itself keeps.
        """
        return whole - core

    def logit_bytes(self, micro_batches: int) -> float:
        """Return the bytes of one logit at the peak of a step."""
        return self.footprint.logit

    def exposed_gather(self, machine: Machine, ranks: Group, size: float) -> float | None:
        """Return the seconds in which ZeRO 3 gathers a block of `size` bytes with nothing else
        running; None if gathering overlaps."""
        return None
