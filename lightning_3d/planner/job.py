"""What is planned: a model, how it is trained, a layout, and the software that runs it. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.layout.layout import AXES, Layout
from lightning_3d.planner.architecture import Architecture


@dataclass(frozen=True)
class Stack:
    """Software that trains: what it keeps in memory, what it overlaps, and how long its host takes. Facts of the software, the same for
    all models and layouts.

    Attributes:
        order: of ranks, innermost first.
        sequence_parallel: what tensor parallelism does not cut is cut along the sequence.
        flash: attention is one kernel that keeps no scores.
        attention_speed: of that kernel, as a factor on what the type of GPU reaches with the best one of its day.
        traffic: bytes that element-wise operations of a block move, as a multiple of what fused ones would.
        gradient_bytes: of a parameter's accumulated gradient. spare_gradient_bytes: of what a backward pass has beside it.
        logit_bytes: of one logit, over all copies that live at once. kept_logit_bytes: of the ones that live on while the next micro-batch
            runs.
        logit_traffic: bytes that the loss reads and writes for one logit.
        host_block: seconds that the host needs to start forward and backward of a block. host_collectives: more where it is cut.
            host_tensor: the same, more for each
            tensor-parallel rank where a pipeline's messages wait for the host.
        host_network: more for each tensor-parallel rank where these are on several nodes.
        host_step: seconds of a step besides.
        optimizer_traffic: bytes that the optimizer reads and writes for one parameter that it steps. every_traffic: that are read and
            written once a step for every parameter of a rank, whatever ZeRO shares.
        reduced_bytes: of a gradient that is sent. scatters: ZeRO scatters gradients, else it reduces all of them on every rank.
        apart: tensors of a block that ZeRO 3 gathers and scatters one by one, before each pass that needs them and not beside it, also
            before a recomputed one; 0: a block at a time, beside the one before. apart_network: share of the bandwidth between nodes that
            these reach.
        hidden: share of a pass that what overlaps with it can hide behind.
        overlaps_all_reduce: at ZeRO stage 0 gradients are reduced while the last micro-batch still runs. overlaps_data: at other stages.
            overlaps_gather: parameters are gathered beside the first micro-batch.
        split: `balanced`, or `filled`: a stage takes blocks until it has its share of all work, or `equal`: as many blocks for each.
        overhead: factor of the allocator on what is allocated. context: bytes of CUDA, of collectives' buffers and of libraries.
        queued: (batch, seq, hidden) tensors of 16 bits that wait to be freed when collectives run beside the work.
        bucket_bytes: of a parameter in buckets that at ZeRO stage 0 are kept beside its gradient.
        gathered_copies: of all parameters, while ZeRO stage 1 gathers them: first in one piece for each rank, then in one.
        largest_gradient: the gradient of the embedding, the largest of a rank, is beside everything else.
        saved: bytes that a block keeps of a token for each unit of hidden size, beyond what its backward pass needs.
            saved_keys: the same for each number of a key and a value. saved_inner: for each unit of an MLP's inner width.
        filled: share of a GPU's memory that the allocator fills before it gives back what it has in reserve.
        ahead: seconds of a block on the host, divided by those after which its last kernel has been started: what comes later does not
            keep the host from running ahead.
        prints_first: the memory that it prints is that of its first rank, else the most of all ranks.
        selective_share: of what a block keeps, with selective recomputation; None: all but half of attention's own.
    """

    name: str = ""
    order: tuple[str, ...] = AXES
    sequence_parallel: bool = True
    flash: bool = True
    traffic: float = 1.5
    gradient_bytes: float = 4.0
    spare_gradient_bytes: float = 0.0
    logit_bytes: float = 8.0
    kept_logit_bytes: float = 0.0
    logit_traffic: float = 24.0
    host_block: float = 1.0e-3
    host_collectives: float = 0.0
    host_tensor: float = 0.0
    attention_speed: float = 1.0
    host_network: float = 0.0
    host_step: float = 0.0
    optimizer_traffic: float = 30.0
    every_traffic: float = 0.0
    reduced_bytes: float = 4.0
    scatters: bool = True
    apart: int = 0
    apart_network: float = 0.3
    hidden: float = 0.8
    overlaps_all_reduce: bool = True
    overlaps_data: bool = True
    overlaps_gather: bool = True
    split: str = "balanced"
    overhead: float = 1.0
    context: float = 0.0
    queued: float = 0.0
    bucket_bytes: float = 0.0
    gathered_copies: int = 0
    largest_gradient: bool = False
    saved: float = 0.0
    saved_keys: float = 0.0
    saved_inner: float = 0.0
    filled: float = 1.0
    ahead: float = 1.0
    prints_first: bool = False
    selective_share: float | None = None


@dataclass(frozen=True)
class Job:
    """One training step on a cluster.

    Attributes:
        seq: tokens of a sequence. global_batch: sequences of a step. micro_batch: sequences that pass a stage at once.
        schedule: of the pipeline, as in `lightning_3d.layout.schedules`.
        zero: stage 0 to 3.
        precision: of matrix products: `bf16` (or 16 bits of another kind), `fp8` or `fp32`.
        weight_bytes, state_bytes: of a parameter, and of what the optimizer keeps for it: 2 and 12 with float32 master weights.
        trained: share of parameters that have gradients.
        reduce, gather: when ZeRO reduces gradients (stages 2, 3) and gathers parameters (stage 3): `step` or `micro_batch`; None as
            `zero_options` fills it in.
        recompute_every: of so many neighbouring blocks one is recomputed.
        recompute: `none`, `selective` (attention and MLP activations, not the products), or `full` (whole blocks).
        sequence_parallel: what tensor parallelism does not cut is cut along the sequence.
    """

    model: Architecture
    layout: Layout
    seq: int
    global_batch: int
    micro_batch: int
    schedule: str = "1F1B"
    zero: int = 1
    precision: str = "bf16"
    weight_bytes: float = 2.0
    state_bytes: float = 12.0
    trained: float = 1.0
    reduce: str | None = None
    gather: str | None = None
    recompute: str = "none"
    recompute_every: int = 1
    sequence_parallel: bool = True
    stack: Stack = Stack()

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.micro_batch * self.layout.dp))

    @property
    def reduces_often(self) -> bool:
        """Whether gradients are reduced in every backward pass, so that a rank keeps its share of them."""
        return self.zero >= 2 and (self.reduce == "micro_batch" if self.reduce else self.layout.pp == 1)

    @property
    def gathers_often(self) -> bool:
        """Whether ZeRO 3 gathers a block's parameters for its forward and again for its backward pass."""
        return self.zero == 3 and self.gather != "step"

    @property
    def width(self) -> int:
        """Bytes of a number in activations and in what is sent of them."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.seq / self.layout.cp
