"""Duration of a pipeline's step: plays its actions with the seconds of each stage. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_3d.layout.pipeline_orders import Order


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch on a stage: forward, whole backward, and the part of the backward
    for gradients of weights."""

    forward: float
    backward: float
    weights: float = 0.0

    def of(self, kind: str) -> float:
        """Return the seconds of an action: F, B, I or W."""
        if kind == "F":
            return self.forward
        if kind == "B":
            return self.backward
        return self.weights if kind == "W" else self.backward - self.weights


@dataclass(frozen=True)
class PredictedTimeline:
    """A played step.

    Attributes:
        seconds: time from the first start to the last end.
        busy: seconds that each rank computes.
        finished: time at which each rank ends its last action.
        events: (rank, stage, kind, micro-batch, start, end) of all actions, when asked for.
    """

    seconds: float
    busy: tuple[float, ...]
    finished: tuple[float, ...]
    events: tuple[tuple[int, int, str, int, float, float], ...] = ()

    @property
    def bubble(self) -> float:
        """Share of the ranks' time, 0 to 1, that they wait."""
        return 1 - sum(self.busy) / (len(self.busy) * self.seconds)


class _Passes(NamedTuple):
    """Forward or backward passes of a stage: by micro-batch, when one ends, and the rank that waits
    for it."""

    ended: dict[int, float]
    waiting: dict[int, int]


_Parts = dict[str, tuple[_Passes | None, _Passes | None, float, float]]
"""Of each kind of action of a stage: the passes that it needs, its own passes, seconds of the
message between them, its seconds."""


def _parts(
    order: Order, stages: Sequence[StageSeconds], message: float, back: float
) -> list[_Parts]:
    """Return the parts of each stage. Stages of one rank need no message; gradients of weights need
    nothing, and nothing needs them."""
    owner = {stage: rank for rank, actions in enumerate(order) for stage, _, _ in actions}
    forwards, backwards = ([_Passes({}, {}) for _ in stages] for _ in range(2))
    parts: list[_Parts] = []
    for stage, seconds in enumerate(stages):
        earlier, later = (
            forwards[stage - 1] if stage else None,
            backwards[stage + 1] if stage + 1 < len(stages) else None,
        )
        way = 0.0 if owner.get(stage - 1) == owner.get(stage) else message
        way_back = 0.0 if owner.get(stage + 1) == owner.get(stage) else back
        backward = {kind: (later, backwards[stage], way_back, seconds.of(kind)) for kind in "BI"}
        parts.append(
            {
                "F": (earlier, forwards[stage], way, seconds.forward),
                **backward,
                "W": (None, None, 0.0, seconds.weights),
            }
        )
    return parts


def play(
    order: Order,
    stages: Sequence[StageSeconds],
    message: float = 0.0,
    *,
    back: float | None = None,
    keep: bool = False,
) -> PredictedTimeline:
    """Play an order: an action starts when its rank is free and what it needs has arrived from the
    neighbouring stage.

    Args:
        order: actions of each rank.
        stages: seconds of each stage.
        message: seconds that a tensor takes between stages of different ranks.
        back: the same for gradients; None: as `message`.
        keep: record the events.

    Raises:
        ValueError: an order in which ranks deadlock.
    """
    parts = _parts(order, stages, message, message if back is None else back)
    position, clock, busy = [0] * len(order), [0.0] * len(order), [0.0] * len(order)
    events = []
    runnable = list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        actions, now, worked = order[rank], clock[rank], busy[rank]
        for place in range(position[rank], len(actions)):
            stage, kind, index = actions[place]
            before, passes, late, seconds = parts[stage][kind]
            start = now
            if before is not None:
                ended = before.ended.get(index)
                if ended is None:
                    before.waiting[index], position[rank] = rank, place
                    break
                arrived = ended + late
                start = max(now, arrived)
            now = start + seconds
            worked += seconds
            if keep:
                events.append((rank, stage, kind, index, start, now))
            if passes is not None:
                passes.ended[index] = now
                if index in passes.waiting and (woken := passes.waiting.pop(index)) != rank:
                    runnable.append(woken)
        else:
            position[rank] = len(actions)
        clock[rank], busy[rank] = now, worked
    if any(done < len(actions) for done, actions in zip(position, order, strict=True)):
        raise ValueError("The order of actions deadlocks, because ranks wait for each other.")
    return PredictedTimeline(max(clock), tuple(busy), tuple(clock), tuple(events))
