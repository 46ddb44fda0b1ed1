"""Bytes of the output head and the loss on a rank of the last stage. Pure Python.

A micro-batch keeps some of them from its forward until its backward (`kept`), of each micro-batch
in flight. More live only while its loss is computed (`peak`). Objectives with a second, frozen
model read whole rows of logits, also where tensor parallelism shards the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_3d.app.planner.job import Job

_WORD = 4
"""Bytes of a number in float32."""


class LossBytes(NamedTuple):
    """Bytes of one micro-batch: what its loss keeps until the backward, and the most that live
    while it is computed, with what it keeps."""

    kept: float
    peak: float


def loss_bytes(job: Job) -> LossBytes:
    """Return the bytes of logits, the loss and its gradients of one micro-batch, for each output
    head."""
    logits = job.tokens * job.model.vocab / job.layout.tp
    kept = _kept_logit(job) * logits
    if job.frozen is not None:
        return _of_pairs(job) if job.calls > 1 else _of_teacher(job, kept, logits)
    if job.loss_parts == 1:
        return LossBytes(kept, max(kept, _peak_logit(job) * logits))
    return _in_parts(job, logits)


def _kept_logit(job: Job) -> float:
    """Bytes of a logit that the loss keeps."""
    footprint = job.stack.footprint
    return footprint.kept_sharded_logit if job.layout.tp > 1 else footprint.kept_logit


def _peak_logit(job: Job) -> float:
    """Bytes of a logit at the most."""
    sharded = job.stack.footprint.sharded_logit
    return (
        sharded
        if job.layout.tp > 1 and sharded is not None
        else job.stack.logit_bytes(job.micro_batches)
    )


def _in_parts(job: Job, logits: float) -> LossBytes:
    """A loss that is computed in parts, with its gradients, in the forward
    (`parallel/deferred_logits.py`): it keeps the gradients of the hidden states and of the head's
    weight. That of the weight follows the loss, or adds up in float32 over several products and is
    then converted."""
    weight = job.model.vocab / job.layout.tp * job.model.hidden
    of_hidden, of_weight = job.width * job.tokens * job.model.hidden, job.width * weight
    part = _peak_logit(job) * logits / job.loss_parts
    if job.loss_products == 1:
        return LossBytes(
            of_hidden + of_weight, of_hidden + max(part, of_weight + job.width * logits)
        )
    return LossBytes(of_hidden + of_weight, of_hidden + _WORD * weight + max(part, of_weight))


def _of_pairs(job: Job) -> LossBytes:
    """DPO (`app/training/preference.py`): the log-softmax of both sequences of a pair. The backward
    of one after the other adds the gradient of its log-softmax and that of its logits."""
    whole = job.width * job.tokens * job.model.vocab
    return LossBytes(whole, whole + 2 * whole / job.calls)


def _of_teacher(job: Job, kept: float, logits: float) -> LossBytes:
    """Distillation (`app/training/objective.py`): what cross-entropy keeps, the log-softmax of both
    models, and meanwhile the logits of both and three results of their divergence. Cross-entropy
    that tensor parallelism shards keeps the logits themselves."""
    whole = job.width * job.tokens * job.model.vocab
    kept += 2 * whole
    own = 0.0 if job.layout.tp > 1 else job.width * logits
    return LossBytes(kept, kept + 3 * whole + own + job.width * logits)


def final_norm_bytes(job: Job) -> float:
    """Return what one micro-batch keeps of the norm before the head: its input in float32, its
    normalized copy and its output, of all tokens. No compiler fuses it."""
    footprint = job.stack.footprint
    if not footprint.stepwise:
        return 0.0
    return (
        job.tokens * job.model.hidden * (footprint.saved / 2 + job.model.kept.norm + 2 * job.width)
    )
