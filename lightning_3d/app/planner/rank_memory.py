"""Bytes of one rank at each moment of a step, of which the largest is its peak. Pure Python.

Of N parameters on a rank, d data-parallel ranks that shard (ZeRO: Rajbhandari et al.,
arXiv:1910.02054, section 3):

    weights 2 N (stage 3: / d), gradients (stages 2 and 3: / d), optimizer with fp32 master weights 12 N (stages 1 to 3: / d)

with fp32 weights 4 N and 12 N, or 8 N at stage 0, whose optimizer needs no copy of them; all in 16
bits 2 N and 4 N. They live all the time, gradients only from the first backward pass on where the
software makes them anew in each step (`Footprint.stepwise`). A backward pass passes these moments,
which need different things:

    frozen    with ZeRO 3, two blocks of a frozen second model, which runs before the stage; nothing of the micro-batch on the last stage
    head      the loss of the micro-batch and its gradients, all that the micro-batches in flight keep
    weight    the gradient of the head's weight; the loss is gone
    block     what a recomputed block needs, the gradients of its largest matrix and of the widest activations
    end       what the other micro-batches keep, all gradients of the stage, that of the embedding a second time
    step      reduced gradients, next to whole ones; no activations
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from lightning_3d.app.planner.block_memory import BlockBytes, ahead_bytes, travelling_bytes
from lightning_3d.app.planner.frozen import frozen_weights
from lightning_3d.app.planner.head_memory import LossBytes, final_norm_bytes, loss_bytes
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.moments import Moment
from lightning_3d.app.planner.stage_memory import StageBytes, StagesOfJob
from lightning_3d.app.planner.stages import Stage, shard_ranks

_AHEAD = 2
"""Messages from each neighbour whose buffers are there before they are needed
(parallel/pipeline/transport.py)."""


class StagesOfRank(NamedTuple):
    """Stages of a pipeline rank, and the moments at which it may need the most memory."""

    stages: tuple[Stage, ...]
    moments: tuple[Moment, ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by category. `other`: collectives, the allocator, CUDA."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    loss: float
    other: float

    @property
    def total(self) -> float:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.loss
            + self.other
        )


class Need(NamedTuple):
    """Bytes that a moment needs in addition to what lives all the time."""

    weights: float = 0.0
    gradients: float = 0.0
    activations: float = 0.0
    loss: float = 0.0


def memory_of_rank(job: Job, own: StagesOfRank, blocks: BlockBytes) -> RankMemory:
    """Memory of one rank.

    Args:
        own: stages of the rank, and its moments.
        blocks: what `block_bytes` returns.
    """
    return RankBytes(job).memory(own, blocks)


class RankBytes:
    """Memory of the ranks of one job, which have many values in common.

    Args:
        at_end: all ranks are the first or the last one of a pipeline, which has one neighbour,
            whatever their stages are.
    """

    def __init__(self, job: Job, *, at_end: bool = False) -> None:
        self.job, self.at_end = job, at_end
        self.stages = StagesOfJob(job)
        self._ranks: dict[tuple[Stage, ...], Rank] = {}

    def memory(self, own: StagesOfRank, blocks: BlockBytes) -> RankMemory:
        """Return the memory of one rank. `blocks`: what `block_bytes` returns."""
        return self.rank(own.stages).memory(own.moments, blocks)

    def rank(self, stages: tuple[Stage, ...]) -> Rank:
        """Return the rank that has these stages."""
        if stages not in self._ranks:
            self._ranks[stages] = Rank(self, stages)
        return self._ranks[stages]

    @cached_property
    def loss(self) -> LossBytes:
        """Bytes of the loss of a micro-batch, for each output head."""
        return loss_bytes(self.job)

    @cached_property
    def beside_blocks(self) -> float:
        """Bytes that a micro-batch keeps on each stage besides its blocks."""
        return travelling_bytes(self.job)

    @cached_property
    def beside_head(self) -> tuple[float, float]:
        """Bytes of a micro-batch that the last stage (keeps, recomputes) besides its blocks."""
        ahead = self.job.model.ahead
        kept, again = ahead_bytes(self.job) if ahead else (0.0, 0.0)
        return ahead * kept + final_norm_bytes(self.job), again


class Rank:
    """What a rank needs at the moments of a step.

    Args:
        of_job: what it has in common with the other ranks.
        stages: its stages.
    """

    def __init__(self, of_job: RankBytes, stages: Sequence[Stage]) -> None:
        job = of_job.job
        self._job, self._stages, self._of_job = job, stages, of_job
        self._bytes = sizes = [of_job.stages[stage] for stage in stages]
        heads, has_head = 1 + job.model.ahead, any(stage.head for stage in stages)
        frozen = frozen_weights(job).held if has_head else 0.0
        self._weights = sum(size.weights for size in sizes) + frozen
        self._optimizer = sum(size.optimizer for size in sizes)
        self._gradients = [size.gradients for size in sizes]
        self._gathered = _gathered_bytes(job, sizes)
        self._frozen = _frozen_bytes(job) if has_head else 0.0
        self._loss = of_job.loss if has_head else LossBytes(0.0, 0.0)
        self._kept_loss = [
            stage.head * heads * self._loss.kept + size.cast_head
            for stage, size in zip(stages, sizes, strict=True)
        ]
        self._embedding = job.model.embedding / job.layout.tp * (job.trained == 1)
        self._messages = _message_bytes(
            job, of_job.at_end or any(stage.embedding or stage.head for stage in stages)
        )

    def memory(self, moments: Sequence[Moment], blocks: BlockBytes) -> RankMemory:
        """Return the memory at the moment that needs most. `blocks`: what `block_bytes` returns."""
        at_head = self._of_job.beside_head if self._loss.peak else (0.0, 0.0)
        beside = self._of_job.beside_blocks
        kept = [
            sum(count * keeps for count, (keeps, _) in zip(stage.counts, blocks, strict=True))
            for stage in self._stages
        ]
        self._kept = [
            own + size.casts + beside + stage.head * at_head[0]
            for own, size, stage in zip(kept, self._bytes, self._stages, strict=True)
        ]
        self._again = [
            max(
                (again for count, (_, again) in zip(stage.counts, blocks, strict=True) if count),
                default=0.0,
            )
            + stage.head * at_head[1]
            for stage in self._stages
        ]
        needs = [*self._needs(moments), self._at_step]
        most, footprint = max(needs, key=sum), self._job.stack.footprint
        other = (footprint.allocator - 1) * max(
            need.activations + need.loss for need in needs
        ) + footprint.context
        return RankMemory(
            self._weights + most.weights,
            most.gradients,
            self._optimizer,
            most.activations,
            most.loss,
            other,
        )

    @property
    def held(self) -> float:
        """What the rank needs at least when its last backward pass ends, or the optimizer's step
        begins: its parameters and their states, without activations."""
        most = max(sum(self._at_step), self._gathered[1] + sum(self._gradients))
        return self._weights + self._optimizer + most + self._job.stack.footprint.context

    @property
    def passing(self) -> float:
        """What the rank needs at least in every backward pass, without activations."""
        gradients = 0.0 if self._stepwise else sum(self._gradients)
        return (
            self._weights
            + self._optimizer
            + self._gathered[0]
            + gradients
            + self._job.stack.footprint.context
        )

    @cached_property
    def _at_step(self) -> Need:
        """What the optimizer's step needs."""
        job, late = self._job, sum(size.late for size in self._bytes)
        reduces_all_early = job.reduces_often and not job.reduces_experts_late
        if (
            job.zero > 0
            and job.stack.footprint.kept_gradient
            and not job.buffers_all_gradients
            and not reduces_all_early
        ):
            buffer = sum(size.buffer for size in self._bytes) if job.reduces_experts_late else 0.0
            late = max(late, buffer, *(size.copied for size in self._bytes))
        if job.zero == 0:
            late += max(size.stepped for size in self._bytes)
        return Need(self._gathered[0], sum(self._gradients) + late)

    def _needs(self, moments: Sequence[Moment]) -> Iterator[Need]:
        """Yield what each moment needs."""
        for moment in moments:
            activations = self._messages + _dot(moment.live, self._kept)
            loss = _dot(moment.live, self._kept_loss)
            if any(moment.pending):
                activations += _dot(moment.pending, self._pending)
                loss -= _dot(moment.pending, self._kept_loss)
            gradients = (
                _dot(moment.graded, self._gradients) if self._stepwise else sum(self._gradients)
            )
            yield from self._backward(moment, Need(0.0, gradients, activations, loss))

    @cached_property
    def _pending(self) -> list[float]:
        """Bytes of a micro-batch of each stage whose gradients of weights are to come."""
        return [_pending_bytes(self._job, stage) for stage in self._stages]

    @property
    def _stepwise(self) -> bool:
        return self._job.stack.footprint.stepwise

    def _backward(self, moment: Moment, before: Need) -> Iterator[Need]:
        """Yield the needs of one backward pass, in the order of time."""
        job, place, (_, gradients, activations, loss) = self._job, moment.place, before
        stage, buckets, kind = self._stages[place], self._bucket, moment.kind
        # of the pass before
        waiting = buckets * self._last_sent(place) if moment.graded[place] else 0.0
        if stage.head and kind != "W":
            if self._frozen:
                weights, others = self._gathered[0] + self._frozen, activations - self._kept[place]
                yield Need(weights, gradients + waiting, others, loss - self._kept_loss[place])
            yield Need(
                self._gathered[0],
                gradients + waiting,
                activations,
                loss + self._loss.peak - self._loss.kept,
            )
        loss -= self._kept_loss[place] * (kind != "W")
        if not self._stepwise:
            yield Need(self._gathered[2], gradients, activations + self._again[place], loss)
            return
        if kind == "B" and stage.head:
            gradients = self._with_head(moment, gradients)
            of_logits = (
                job.width * job.tokens * job.model.vocab / job.layout.tp
                if job.loss_parts == 1
                else 0.0
            )
            arrived = (
                self._arrives(moment)
                + job.width * job.autocast
                + buckets * (not job.sends_ends_last)
            ) * self._embedding
            yield Need(self._gathered[0], gradients + arrived, activations, loss + of_logits)
            yield Need(
                self._gathered[0],
                gradients + self._copies(moment) * self._embedding,
                activations,
                loss,
            )
        if kind == "B" and job.calls > 1 and stage.head:
            yield self._second_call(moment, before)
        size = self._bytes[place]
        # Recomputed activations are freed while gradients come. Without recomputation, the
        # gradients of neighbouring matrices meet.
        halves = {"I": size.of_inputs, "W": size.of_weights} if job.recompute == "full" else {}
        again = self._again[place] + size.cast_again + halves.get(kind, size.temporary)
        if kind != "I":
            yield from self._of_blocks(
                moment, Need(self._gathered[2], gradients, activations + again, loss), waiting
            )
            yield self._end(moment, activations, loss)
        else:
            yield Need(
                self._gathered[2], gradients, activations + again + self._pending[place], loss
            )

    def _of_blocks(self, moment: Moment, before: Need, waiting: float) -> Iterator[Need]:
        """Yield what the backward of a block needs: `before`, and gradients that have arrived.

        Args:
            waiting: bytes of the bucket that the pass before sent last.
        """
        job, size, head = (
            self._job,
            self._bytes[moment.place],
            self._embedding * self._stages[moment.place].head,
        )
        sent = 2 * self._bucket * size.matrix
        if not job.sends_ends_last:
            yield before._replace(gradients=before.gradients + sent + self._copies(moment) * head)
            return
        # The gradients of a block are sent when its backward is over. Until the first ones are, the
        # last bucket of the pass before waits.
        gradients = before.gradients + job.number * head
        yield before._replace(gradients=gradients + waiting + 2 * job.number * size.matrix)
        freed = self._kept[moment.place] / max(1, size.blocks)
        yield before._replace(gradients=gradients + sent, activations=before.activations - freed)

    def _end(self, moment: Moment, activations: float, loss: float) -> Need:
        """Return the need of the end of a pass. Gradients arrive in the type of their weights, one
        after the other; all of them where no hooks add them to their sums meanwhile: in the second
        half of a split backward."""
        place, width = moment.place, self._arrives(moment)
        gradients = _dot(moment.graded, self._gradients) + (
            0.0 if moment.graded[place] else self._gradients[place]
        )
        stage, ends_last = self._stages[place], self._job.sends_ends_last
        has_embedding = stage.embedding or (stage.head and ends_last)
        arrived = (width + self._bucket) * max(
            self._embedding * has_embedding, self._bytes[place].matrix
        )
        # the head's bucket is on its way; of a tied weight, a second gradient
        if ends_last and stage.embedding and stage.head:
            arrived += (
                self._job.number if self._job.model.tied else self._bucket
            ) * self._embedding
        if moment.kind == "W":
            arrived = max(arrived, width * self._bytes[place].parameters)
            activations -= self._pending[place]
        return Need(self._gathered[1], gradients + arrived, activations - self._kept[place], loss)

    def _second_call(self, moment: Moment, before: Need) -> Need:
        """Return the need of a pass through a model that was called twice, when the second call's
        begins: autograd keeps the gradients of the first one until it can add those of the
        second."""
        place, own = moment.place, 1 - 1 / self._job.calls
        activations, loss = (
            before.activations - own * self._kept[place],
            before.loss - own * self._kept_loss[place],
        )
        gradients = before.gradients + self._job.width * self._bytes[place].parameters
        return Need(
            self._gathered[0], gradients, activations, loss + self._loss.peak - self._loss.kept
        )

    def _with_head(self, moment: Moment, gradients: float) -> float:
        """Add the sum of the gradient of the head's weight, where it is the first one."""
        often = self._job.reduces_often
        return (
            gradients
            if moment.graded[moment.place] or often
            else gradients + self._job.stack.footprint.gradient * self._embedding
        )

    @property
    def _bucket(self) -> float:
        """Bytes for each element of a bucket that is on its way in every backward pass."""
        return self._job.stack.footprint.gradient if self._job.reduces_often else 0.0

    def _last_sent(self, place: int) -> float:
        """Count the elements of a stage with the head whose gradients a pass sends when it ends:
        those of the embedding; all but those of the head where a model that ZeRO 3 gathers in
        blocks was called twice."""
        stage, model = self._stages[place], self._job.model
        if self._job.calls == 1 or not self._job.gathers_often or self._job.trained < 1:
            return self._embedding * stage.embedding
        return self._bytes[place].parameters - self._embedding * (
            not (stage.embedding and model.tied)
        )

    def _arrives(self, moment: Moment) -> float:
        """Bytes for each element of a gradient beside its sum, when it arrives. The first one of
        float32 weights becomes the sum (`GradientSums` in parallel/zero/gradients.py)."""
        job = self._job
        is_sum = (
            job.number == job.stack.footprint.gradient
            and not moment.graded[moment.place]
            and not job.reduces_often
        )
        return 0.0 if is_sum else job.number

    def _copies(self, moment: Moment) -> float:
        """Bytes for each element of a bucket that takes a copy of a complete gradient in the last
        backward pass."""
        alone = self._job.layout.dp * self._job.layout.cp == 1
        return (
            0.0
            if alone or not moment.last or self._job.reduces_often
            else self._job.stack.footprint.gradient
        )


def _gathered_bytes(job: Job, stages: Sequence[StageBytes]) -> tuple[float, ...]:
    """Return the bytes of the weights that ZeRO 3 has gathered with 0, 1 and 2 blocks; it gathers
    what is outside of blocks for all of a batch."""
    if job.zero != 3:
        return (0.0,) * 3
    if not job.gathers_often:
        return (sum(stage.whole for stage in stages),) * 3
    block, outside = max(stage.block for stage in stages), sum(stage.outside for stage in stages)
    most = sum(stage.blocks for stage in stages)
    return tuple(min(blocks, most) * block + outside for blocks in range(3))


def _frozen_bytes(job: Job) -> float:
    """Return the bytes that a frozen second model needs while it runs: two blocks, and this rank's
    part of one, which it sends to the others."""
    return frozen_weights(job).passing * (1 + 1 / (2 * shard_ranks(job)[0]))


def _dot(factors: Sequence[int], sizes: Sequence[float]) -> float:
    return sum(map(mul, factors, sizes))


def _message_bytes(job: Job, at_end: bool) -> float:
    """Bytes of messages between pipeline stages: buffers for those from each neighbour, and one
    that has come and one that goes."""
    layout = job.layout
    if layout.pp == 1 or not job.stack.footprint.stepwise:
        return 0.0
    directions = 2 - at_end * (layout.vp == 1)
    return (
        (_AHEAD * directions + 2)
        * job.width
        * job.tokens
        * job.model.hidden
        / (layout.tp if job.sequence_parallel else 1)
    )


def _pending_bytes(job: Job, stage: Stage) -> float:
    """Bytes of a micro-batch whose backward has computed the gradients of inputs only: the
    gradients of the outputs of all products and norms that have weights."""
    model, tp = job.model, job.layout.tp
    norms = 2 * model.hidden / (tp if job.sequence_parallel else 1)
    attention = sum(
        matrix.local(tp)[0] / (tp if matrix.sharded_by == "row" and job.sequence_parallel else 1)
        for matrix in model.attention
    )
    size = 0.0
    for kind, count in zip(model.kinds, stage.counts, strict=True):
        inner = model.top_k * model.expert_ffn + model.shared_ffn if kind.mixture else model.ffn
        size += count * (norms + attention + (1 + model.gated) * inner / tp + norms / 2)
    return (
        job.width
        * job.tokens
        * (size + stage.head * (1 + model.ahead) * (model.vocab / tp + model.hidden))
    )
