"""Moments of a step at which a rank of a pipeline may need the most memory: the beginnings of its
backward passes. Pure Python."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from lightning_3d.layout.pipeline_orders import training_order
from lightning_3d.layout.schedules import find_schedule, stages_of_rank


class Moment(NamedTuple):
    """The beginning of a backward pass of one micro-batch on one stage. Tuples have a value for
    each stage of the rank.

    Attributes:
        place: index of that stage among the rank's.
        live: micro-batches whose activations are alive.
        pending: those of them whose gradients of inputs are computed, and those of weights are not
            (a split backward).
        graded: flags of stages that have gradients of an earlier micro-batch.
        kind: B for a whole pass; I and W for the halves of a split one, of which W frees the
            activations. On the first stage, which sends no gradients, W is a whole pass
            (`_backward_weight` in parallel/pipeline/engine.py).
        last: no other micro-batch adds to the gradients of this stage afterwards.
    """

    place: int
    live: tuple[int, ...]
    pending: tuple[int, ...]
    graded: tuple[bool, ...]
    kind: str = "B"
    last: bool = False

    def covers(self, other: Moment) -> bool:
        """Return True if at least as much is alive as at another moment of the same stages."""
        same = (self.place, self.kind) == (other.place, other.kind) and self.last >= other.last
        return same and all(
            a >= b
            for mine, its in zip(self[1:4], other[1:4], strict=True)
            for a, b in zip(mine, its, strict=True)
        )


_Key = tuple[bool, bool, bool, str, tuple[bool, ...]]
"""What moments are told apart by: the first stage, the last stage, `last`, `kind`, `graded`."""


class RankMoments(NamedTuple):
    """Indices of the stages of a rank, and the moments at which it may need the most memory."""

    stages: tuple[int, ...]
    moments: tuple[Moment, ...]


@lru_cache(maxsize=1024)
def moments_of(schedule: str, pp: int, vp: int, micro_batches: int) -> tuple[RankMoments, ...]:
    """Return the moments of each rank. Of those that differ only in which micro-batches are alive,
    those with the most are kept; first, last and other stages are kept apart, because of the
    embedding and the head."""
    v_shaped = find_schedule(schedule).v_shaped and pp > 1
    orders = training_order(schedule, pp, vp, micro_batches)
    ranks = [stages_of_rank(rank, pp, vp, v_shaped) for rank in range(pp)]
    return tuple(
        RankMoments(tuple(stages), _of_rank(actions, stages, pp * vp - 1))
        for stages, actions in zip(ranks, orders, strict=True)
    )


class _Alive(NamedTuple):
    """A moment, with the micro-batches that are alive then: on its stage, in all, and in all those
    that are pending."""

    here: int
    all: int
    pending: int
    moment: Moment

    def has_more(self, here: int, all: int, pending: int) -> bool:
        """True if so many micro-batches or more are alive and pending."""
        return self.here >= here and self.all >= all and self.pending >= pending


def _of_rank(
    actions: tuple[tuple[int, str, int], ...], stages: tuple[int, ...], last_stage: int
) -> tuple[Moment, ...]:
    count = len(stages)
    place_of = {stage: place for place, stage in enumerate(stages)}
    live, pending, graded, all_live, all_pending = [0] * count, [0] * count, (False,) * count, 0, 0
    passes = Counter(stage for stage, kind, _ in actions if kind in "BW")
    to_come = [passes[stage] for stage in stages]
    found: dict[_Key, list[_Alive]] = {}
    for stage, kind, _ in actions:
        place = place_of[stage]
        if kind == "F":
            live[place] += 1
            all_live += 1
            continue
        if stage == 0 and kind != "B":
            if kind == "I":
                continue
            kind = "B"
        is_last = kind != "I" and to_come[place] == 1
        others = found.setdefault((stage == 0, stage == last_stage, is_last, kind, graded), [])
        alive = live[place], all_live, all_pending
        for other in others:
            if other.has_more(*alive):
                break
        else:
            moment = _Alive(
                *alive, Moment(place, tuple(live), tuple(pending), graded, kind, is_last)
            )
            others[:] = [*(other for other in others if not moment.has_more(*other[:3])), moment]
        if kind == "I":
            pending[place] += 1
            all_pending += 1
            continue
        live[place] -= 1
        all_live -= 1
        pending[place] -= kind == "W"
        all_pending -= kind == "W"
        to_come[place] -= 1
        if not graded[place]:
            graded = (*graded[:place], True, *graded[place + 1 :])
    return tuple(
        alive.moment
        for key, moments in found.items()
        for alive in moments
        if not _is_later(key, alive, found)
    )


def _is_later(key: _Key, moment: _Alive, found: dict[_Key, list[_Alive]]) -> bool:
    """True if there is a moment of the same kind when more stages have gradients, and as much is
    alive."""
    later = [
        name
        for name in found
        if name[:4] == key[:4] and name != key and all(map(bool.__ge__, name[4], key[4]))
    ]
    return any(other.has_more(*moment[:3]) for name in later for other in found[name])
