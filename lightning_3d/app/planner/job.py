"""A training step to predict: model, batch, layout, and the software that runs it. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.stack import Stack
from lightning_3d.layout.layout import Layout
from lightning_3d.layout.loss_chunks import count_chunks, count_products
from lightning_3d.layout.schedules import find_schedule

_COMPUTED = ("loss_parts", "tokens")
"""Properties that a job keeps when they have been computed."""


@dataclass(frozen=True)
class Job:
    """One training step on a cluster.

    Attributes:
        model: sizes of the model.
        layout: degrees of parallelism and order of ranks.
        seq: tokens of a sequence.
        global_batch: sequences of a step.
        micro_batch: sequences that pass a stage at once.
        schedule: name of the pipeline schedule, as in `lightning_3d.layout.schedules`.
        zero: ZeRO stage, 0 to 3.
        precision: precision of matrix products: `bf16` (or another 16-bit format), `fp8`, `fp4` or
            `fp32`.
        weight_bytes: bytes of a parameter; 2 with float32 master weights.
        state_bytes: bytes that the optimizer keeps for a parameter; 12 with float32 master weights.
        master_bytes: bytes that it keeps in addition at ZeRO stages 1 to 3: a float32 copy of
            weights that are float32 themselves.
        saved_block_bytes: bytes less that it keeps for a parameter of a block: Muon has one
            momentum for each, AdamW two.
        autocast: weights are in float32, and products are in 16 bits, for which torch's autocast
            makes copies.
        trained: share of parameters that have gradients.
        reduce: time of ZeRO's gradient reduction (stages 2, 3): `step` or `micro_batch`; None as in
            `ZeroOptions.resolve`.
        gather: time of ZeRO's parameter gathering (stage 3): `step` or `micro_batch`; None as in
            `ZeroOptions.resolve`.
        recompute: `none`, `selective` (attention without its projections), or `full` (whole
            blocks).
        recompute_every: one of every n neighbouring blocks is recomputed.
        sequence_parallel: tensor-parallel ranks split the sequence where they do not shard a layer.
        reduce_scatter: ZeRO sends each gradient only to the rank that keeps it, where it can.
        shard_size: data-parallel indices over which ZeRO shards, a divisor of dp, as in
            `ZeroOptions`; None for all of them.
        overlap_gather: parameters are gathered while the next forward runs, as in `ZeroOptions`.
        loss_chunks: see `ModelOptions.loss_chunks`.
        blocks: number of blocks of each pipeline stage; None as the stack splits them.
        stack: software that runs the step.
        calls: sequences of each sample that pass the model together, 2 for the pairs of DPO.
        frozen: frozen second model (a reference, a teacher), which all ranks of the last stage run
            forward; None without one.
        frozen_bytes: bytes of one of its parameters.
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
    master_bytes: float = 0.0
    saved_block_bytes: float = 0.0
    autocast: bool = False
    trained: float = 1.0
    reduce: str | None = None
    gather: str | None = None
    recompute: str = "none"
    recompute_every: int = 1
    sequence_parallel: bool = True
    reduce_scatter: bool = True
    shard_size: int | None = None
    overlap_gather: bool = False
    loss_chunks: int | str = 1
    blocks: tuple[int, ...] | None = None
    stack: Stack = Stack()
    calls: int = 1
    frozen: Architecture | None = None
    frozen_bytes: float = 2.0

    def but(self, **changes: Any) -> Job:
        """Return the job with other values, as `dataclasses.replace` does, in a fifth of its time:
        a search makes ten thousands of jobs."""
        values = vars(self) | changes
        for name in _COMPUTED:
            values.pop(name, None)
        other = object.__new__(Job)
        vars(other).update(values)
        return other

    @property
    def micro_batches(self) -> int:
        return max(1, self.global_batch // (self.micro_batch * self.layout.dp))

    @property
    def splits_backward(self) -> bool:
        """True if gradients of weights are computed in a pass of their own."""
        return self.layout.pp > 1 and find_schedule(self.schedule or "1F1B").split_backward

    @property
    def buffers_all_gradients(self) -> bool:
        """True if ZeRO 1 and 2 reduce gradients in one tensor of all of them: without
        reduce-scatter, and where tp does not divide the vocabulary and more than two ranks share
        the parameters."""
        return (
            self.zero in (1, 2)
            and not self.reduces_often
            and (self.is_uneven or not self.reduce_scatter)
        )

    @property
    def is_uneven(self) -> bool:
        """True if gradients are all-reduced over all data-parallel ranks, so that copies on
        tensor-parallel ranks stay equal."""
        return self.model.vocab % self.layout.tp > 0 and self.layout.dp * self.layout.cp > 2

    @property
    def scatters(self) -> bool:
        """True if each gradient is sent only to the rank that keeps it (reduce-scatter), otherwise
        to all ranks (all-reduce): see `_scatters` in parallel/zero/__init__.py."""
        return self.zero > 0 and self.stack.scatters and self.reduce_scatter and not self.is_uneven

    @property
    def sends_whole_stages(self) -> bool:
        """True if the gradients of a pipeline stage are sent when its last backward is over,
        otherwise in it: those in one tensor and those of ZeRO 3 (`early_bytes` in
        parallel/zero/__init__.py)."""
        waits = self.stack.waits_for_stages and self.zero == 3
        return self.buffers_all_gradients or (waits and not self.reduces_often)

    @property
    def shards(self) -> int:
        """Number of data-parallel indices over which ZeRO shards."""
        return self.shard_size or self.layout.dp

    @property
    def reduces_often(self) -> bool:
        """True if gradients are reduced in every backward pass, so that a rank keeps only its shard
        of them."""
        return self.zero >= 2 and (
            self.reduce == "micro_batch" if self.reduce else self.layout.pp == 1
        )

    @property
    def sends_ends_last(self) -> bool:
        """True if gradients of parameters outside of blocks are sent when the backward pass of a
        micro-batch is over, the head's before the embedding's: ZeRO 3 that gathers and reduces
        block by block (`_reducer_of_units` in parallel/zero/__init__.py)."""
        return self.gathers_often and self.reduces_often and self.stack.waits_for_stages

    @property
    def reduces_experts_late(self) -> bool:
        """True if ep distributes experts over ranks and their gradients are reduced once in a step,
        when the last backward of a stage is over: all of them at once, in one buffer
        (`_may_be_early` in parallel/zero/trained.py; parallel/zero/__init__.py)."""
        return self.layout.ep > 1 and self.stack.waits_for_stages

    @property
    def gathers_often(self) -> bool:
        """True if ZeRO 3 gathers a block's parameters for its forward pass and again for its
        backward pass."""
        return self.gathers_frozen_often and (self.gather is not None or not self.splits_backward)

    @property
    def gathers_frozen_often(self) -> bool:
        """True if ZeRO 3 gathers a block of a frozen second model for each of its forward passes:
        also where a split backward needs all parameters of the trained one
        (`ZeroOptions.gather_frozen`)."""
        return self.zero == 3 and (self.gather != "step" or self.splits_backward)

    @property
    def sends_often(self) -> bool:
        """True if ZeRO reduces gradients or gathers parameters, of a frozen model at least, for
        every micro-batch."""
        return self.gathers_frozen_often or self.reduces_often

    @cached_property
    def loss_parts(self) -> int:
        """Number of chunks in which the loss of a micro-batch is computed: one for objectives with
        a second model, which read logits."""
        if self.frozen is not None:
            return 1
        columns = ceil(self.model.vocab / self.layout.tp)
        return count_chunks(
            self.loss_chunks, int(self.tokens), columns, self.model.hidden, self.width
        )

    @property
    def loss_products(self) -> int:
        """Number of products with the head's weight in which the loss of a micro-batch is
        computed."""
        return count_products(self.loss_parts, self.width) if self.loss_parts > 1 else 1

    @property
    def attention_tp(self) -> int:
        """Number of ranks that shard attention."""
        return 1 if self.model.whole_attention else self.layout.tp

    @property
    def expert_precision(self) -> str:
        """Precision of the products of routed experts."""
        return self.stack.expert_precision(self.precision, self.weight_bytes)

    @property
    def width(self) -> int:
        """Bytes of a number in activations, also when they are sent."""
        return 4 if self.precision == "fp32" else 2

    @property
    def number(self) -> int:
        """Bytes of a number in weights and in gradients that arrive."""
        return 4 if self.autocast else self.width

    @cached_property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.calls * self.micro_batch * self.seq / self.layout.cp
