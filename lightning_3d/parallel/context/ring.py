"""Ring attention: every rank keeps its queries, keys and values travel around the ring (Liu,
Zaharia and Abbeel, arXiv:2310.01889).

While a rank attends to the keys and values that it has, it sends them to the next rank and receives
others from the previous one. In the backward, keys and values travel around the ring again. Their
gradients follow one step behind, and are back on the rank of the keys and values after the last
step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_3d.parallel.context.collectives import Passing, Ring
from lightning_3d.parallel.context.kernels import (
    Gradients,
    Result,
    Scores,
    attend,
    attend_backward,
    finite,
    wide,
)
from lightning_3d.parallel.context.masks import Mask, Span
from lightning_3d.parallel.context.zigzag import chunk_length, chunk_starts

KEYS, GRADIENTS = 1, 2
"""Tags of messages."""


class Course:
    """Order in which blocks travel around the ring.

    Args:
        spans: of every rank, the positions of its tokens in its order.
    """

    def __init__(
        self,
        ring: Ring | None,
        spans: list[tuple[Span, ...]],
        rank: int,
        mask: Mask,
        scores: Scores,
    ) -> None:
        self.ring, self._spans, self._rank = ring, spans, rank
        self.mask, self.scores = mask, scores
        self.steps = len(spans)

    @classmethod
    def around(cls, mask: Mask, scores: Scores) -> Course:
        """The course of keys and values around all ranks, each of which has its tokens of the
        sequence."""
        context = mask.context
        ring = Ring(context) if context.size > 1 else None
        chunk = chunk_length(mask.length, context.size)
        spans = [
            tuple(Span(start, chunk) for start in chunk_starts(chunk, context.size, rank))
            for rank in range(context.size)
        ]
        return cls(ring, spans, context.rank, mask, scores)

    @classmethod
    def of_one(cls, mask: Mask, scores: Scores) -> Course:
        """The course on a rank that has all tokens, in the order of the sequence: nothing
        travels."""
        return cls(None, [(Span(0, mask.length),)], 0, mask, scores)

    def blocks(self, step: int) -> list[tuple[Span, int, Span, int]]:
        """Blocks of a step: (queries, their first place, keys, their first place), the keys of the
        rank from which they are now."""
        return [
            (*own, *other)
            for own in self._placed(self._rank)
            for other in self._placed((self._rank - step) % self.steps)
        ]

    def _placed(self, rank: int) -> list[tuple[Span, int]]:
        spans = self._spans[rank]
        return [
            (span, sum(other.length for other in spans[:index])) for index, span in enumerate(spans)
        ]

    def pass_on(self, tensor: Tensor, step: int, tag: int) -> Passing | None:
        """Pass the block on, if a rank has not seen it yet."""
        return (
            self.ring.pass_on(tensor, tag)
            if self.ring is not None and step + 1 < self.steps
            else None
        )


def attend_around(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, course: Course
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries to the keys of all ranks: cp - 1 messages of this rank's
    keys and values to the next rank.

    Args:
        query: (batch, heads, seq / cp, width), zigzag (see there). key, value: (batch, key heads,
            seq / cp, width).
        sinks: (heads,), scores of a key that has no value (gpt-oss).

    Returns:
        (batch, heads, seq / cp, value width), and the log of the sum of exponentials (batch, heads,
        seq / cp) in the type of accumulation.
    """
    with torch.autocast(query.device.type, enabled=False):
        result = Result.empty(query, value.shape[-1])
        travelling = _pack(key, value)
        for step in range(course.steps):
            passing = course.pass_on(travelling, step, KEYS)
            keys, values = _unpack(travelling, key, value)
            for queries, place, others, there in course.blocks(step):
                part = result.narrow(place, queries.length)
                span = (2, there, others.length)
                own = query.narrow(2, place, queries.length)
                attend(
                    part,
                    own,
                    keys.narrow(*span),
                    values.narrow(*span),
                    queries,
                    others,
                    course.mask,
                    course.scores,
                )
            if passing is not None:
                travelling = passing.wait()
        if sinks is not None:
            _sink(result, sinks)
        return result.out.to(query.dtype), result.lse


def attend_around_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    course: Course,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and sinks: cp - 1 messages of keys and values, and cp of
    their gradients in the type of accumulation (float32 for 16-bit tensors).

    Args:
        out, lse: results of `attend_around`.
    """
    with torch.autocast(query.device.type, enabled=False):
        kind = wide(query.dtype)
        delta = (grad_out.to(kind) * out.to(kind)).sum(-1)
        grad_query = torch.zeros_like(query, dtype=kind)
        travelling = _pack(key, value)
        returning: Passing | None = None
        for step in range(course.steps):
            passing = course.pass_on(travelling, step, KEYS)
            keys, values = _unpack(travelling, key, value)
            carried = torch.zeros_like(travelling, dtype=kind)
            grad_keys, grad_values = _unpack(carried, key, value)
            for queries, place, others, there in course.blocks(step):
                own, span = (2, place, queries.length), (2, there, others.length)
                attend_backward(
                    Gradients(
                        grad_query.narrow(*own), grad_keys.narrow(*span), grad_values.narrow(*span)
                    ),
                    grad_out.narrow(*own),
                    delta.narrow(*own),
                    Result(out.narrow(*own), lse.narrow(*own)),
                    query.narrow(*own),
                    keys.narrow(*span),
                    values.narrow(*span),
                    queries,
                    others,
                    course.mask,
                    course.scores,
                )
            if returning is not None:
                carried += returning.wait()
            if course.ring is not None:
                returning = course.ring.pass_on(carried, GRADIENTS)
            if passing is not None:
                travelling = passing.wait()
        if returning is not None:
            carried = returning.wait()
        grad_key, grad_value = _unpack(carried, key, value)
        grad_sinks = None
        if sinks is not None:
            weight = (sinks.to(kind).view(1, -1, 1) - finite(lse)).exp()
            grad_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
        )


def _sink(result: Result, sinks: Tensor) -> None:
    """Let a key without value take its part of the attention."""
    total = torch.logaddexp(result.lse, sinks.to(result.lse.dtype).view(1, -1, 1))
    result.out.mul_((result.lse - total).exp_().unsqueeze(-1))
    result.lse.copy_(total)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(message: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, in the shapes of `key` and `value`."""
    return message[: key.numel()].view(key.shape), message[key.numel() :].view(value.shape)
