"""Bytes of one stage of a pipeline rank whatever its micro-batches keep: parameters, their states,
what its backward pass needs. Pure Python."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.stages import Stage, one_block, parameters_of, shard_ranks


class StageBytes(NamedTuple):
    """Bytes of one stage on a rank.

    Attributes:
        weights: of its parameters, that live all the time.
        optimizer: of their states.
        gradients: of its gradients, once it has some.
        late: reduced gradients, which the optimizer's step needs in addition.
        buffer: gradients of routed experts that are reduced in one tensor.
        copied: the largest gradient, which a bucket copies.
        stepped: temporary ones of the optimizer when it steps the largest parameter.
        matrix: elements of the largest parameter of its blocks; 0 where not all parameters are
            trained.
        temporary: what the backward pass of a block needs in addition to what it kept.
        of_inputs: of this, what the first half of a split backward needs, which computes no
            gradients of weights.
        of_weights: what its second half needs.
        parameters: trained parameters.
        whole: weights, if none were sharded.
        block: of these, those of its largest block.
        outside: of these, those outside of blocks.
        blocks: number of blocks.
        casts: copies of weights of blocks in 16 bits that autocast makes for each micro-batch, of
            what is not recomputed.
        cast_again: those of a recomputed block.
        cast_head: that of the head's weight.
    """

    weights: float
    optimizer: float
    gradients: float
    late: float
    buffer: float
    copied: float
    stepped: float
    matrix: float
    temporary: float
    of_inputs: float
    of_weights: float
    parameters: float
    whole: float
    block: float
    outside: float
    blocks: int
    casts: float
    cast_again: float
    cast_head: float


class _Rates(NamedTuple):
    """Bytes of each parameter of a kind: routed experts, or all others. `block_state`: less for one
    of a block."""

    weight: float
    state: float
    block_state: float
    gradient: float
    late: float


class _KindBytes(NamedTuple):
    """Of a block of some kind: elements of its largest parameter, what its backward pass and the
    halves of a split one need, bytes of its weights."""

    matrix: float
    temporary: float
    of_inputs: float
    of_weights: float
    weights: float


class StagesOfJob:
    """Bytes of the stages of one job, each computed once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rates = _rates_of(job)
        self._known: dict[Stage, StageBytes] = {}

    def __getitem__(self, stage: Stage) -> StageBytes:
        if stage not in self._known:
            self._known[stage] = self._compute(stage)
        return self._known[stage]

    @cached_property
    def _kinds(self) -> tuple[_KindBytes, ...]:
        job, model, layout = self._job, self._job.model, self._job.layout
        is_trained, found = job.trained == 1, []
        for kind, alone in zip(model.kinds, one_block(job), strict=True):
            if kind.mixture:
                split = layout.ep if layout.ep > 1 else layout.tp
                matrix = (
                    model.experts
                    * (2 if model.gated else 1)
                    * model.expert_ffn
                    * model.hidden
                    / split
                )
                # the gradients of the outputs of routed experts, which are weighted in float32:
                # twice in that type and once more
                inputs = (
                    job.tokens
                    * (8 + job.width)
                    * model.top_k
                    * model.hidden
                    / (layout.tp if layout.ep > 1 else 1)
                )
                again = inputs
            else:
                matrix = model.ffn * model.hidden / layout.tp
                # of the inner numbers of an MLP
                inputs = job.width * job.tokens * model.ffn / layout.tp
                again = inputs + job.width * model.hidden * is_trained * model.ffn / layout.tp
            matrix = max(matrix, model.largest_attention / job.attention_tp)
            weights = job.width * matrix * is_trained
            most, inputs, of_matrix = (
                need * job.stack.footprint.stepwise
                for need in (max(again, weights), inputs, weights)
            )
            found.append(
                _KindBytes(
                    matrix,
                    most,
                    inputs,
                    of_matrix,
                    sum(parameters_of(job, alone)) * job.weight_bytes,
                )
            )
        return tuple(found)

    def _compute(self, stage: Stage) -> StageBytes:
        job, trained, (one, of_experts) = self._job, self._job.trained, self._rates
        own, routed = parameters_of(job, stage)
        in_blocks = (
            parameters_of(job, Stage(stage.counts, False, False))[0]
            if stage.embedding or stage.head
            else own
        )
        kinds = [kind for kind, count in zip(self._kinds, stage.counts, strict=True) if count]
        matrix = max([kind.matrix for kind in kinds], default=0.0)
        largest = (
            max(matrix, job.model.embedding / job.layout.tp)
            if stage.embedding or stage.head
            else matrix
        )
        copied = job.stack.footprint.kept_gradient * trained
        return StageBytes(
            weights=own * one.weight + routed * of_experts.weight,
            optimizer=own * one.state
            + routed * of_experts.state
            - in_blocks * one.block_state
            - routed * of_experts.block_state,
            gradients=own * one.gradient + routed * of_experts.gradient,
            late=own * one.late + routed * of_experts.late,
            buffer=copied * routed,
            copied=copied * largest,
            stepped=job.stack.footprint.stepping * trained * largest,
            matrix=matrix * (trained == 1),
            temporary=max([kind.temporary for kind in kinds], default=0.0),
            of_inputs=max([kind.of_inputs for kind in kinds], default=0.0),
            of_weights=max([kind.of_weights for kind in kinds], default=0.0),
            parameters=trained * (own + routed),
            whole=(own + routed) * job.weight_bytes,
            block=max([kind.weights for kind in kinds], default=0.0),
            outside=(own - in_blocks) * job.weight_bytes,
            blocks=stage.blocks,
            **self._casts(stage, in_blocks),
        )

    def _casts(self, stage: Stage, in_blocks: float) -> dict[str, float]:
        """Return the copies of weights that autocast makes: of linear layers, so not of the
        embedding's look-up and of routed experts.

        Args:
            in_blocks: parameters of the stage's blocks without routed experts.
        """
        job = self._job
        again = 1 / job.recompute_every if job.recompute == "full" else 0.0
        of_blocks, head = (
            in_blocks * job.width * job.autocast,
            job.model.embedding / job.layout.tp * job.width * job.autocast,
        )
        one = of_blocks / max(1, stage.blocks)
        return {
            "casts": (1 - again) * of_blocks,
            "cast_again": one * (again > 0),
            "cast_head": head * stage.head,
        }


def _rates_of(job: Job) -> tuple[_Rates, _Rates]:
    """Return the bytes of each parameter: of those that are no routed experts, and of those."""
    footprint, trained, found = job.stack.footprint, job.trained, []
    early = job.reduces_often, job.reduces_often and not job.reduces_experts_late
    for ranks, often in zip(shard_ranks(job), early, strict=True):
        gradient = (
            footprint.gradient / ranks if often else footprint.gradient + footprint.spare_gradient
        )
        late = (
            footprint.kept_gradient / (1 if job.buffers_all_gradients else ranks)
            if job.zero > 0 and not often
            else 0.0
        )
        # room for all that is reduced is made with the first bucket
        if job.zero == 3 and job.reduces_often:
            gradient, late = gradient + late, 0.0
        sharers = ranks if job.zero >= 1 else 1
        weight = job.weight_bytes / (ranks if job.zero == 3 else 1)
        kept = job.state_bytes + (job.master_bytes if job.zero else 0.0)
        state, of_block = trained * kept / sharers, trained * job.saved_block_bytes / sharers
        found.append(_Rates(weight, state, of_block, trained * gradient, trained * late))
    return found[0], found[1]
