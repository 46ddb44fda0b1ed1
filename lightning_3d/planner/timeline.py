"""Duration of a pipeline's step: plays its actions with the seconds of each stage. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_3d.layout.pipeline_orders import Order, training_order


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch on a stage: forward, whole backward, and the part of the backward for gradients of weights."""

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
class Timeline:
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


def play(
    order: Order, stages: Sequence[StageSeconds], message: float = 0.0, *, back: float | None = None, keep: bool = False
) -> Timeline:
    """Play an order: an action starts when its rank is free and what it needs has arrived from the neighbouring stage.

    Args:
        order: actions of each rank.
        stages: seconds of each stage.
        message: seconds that a tensor takes between stages of different ranks.
        back: the same for gradients; None: as `message`.
        keep: record the events.

    Raises:
        ValueError: an order in which ranks deadlock.
    """
    last = len(stages) - 1
    late = message if back is None else back
    owner = {stage: rank for rank, actions in enumerate(order) for stage, _, _ in actions}
    ready: dict[tuple[int, str, int], float] = {}
    position, clock, busy = [0] * len(order), [0.0] * len(order), [0.0] * len(order)
    events = []
    waiting: dict[tuple[int, str, int], int] = {}
    runnable = list(range(len(order)))
    while runnable:
        rank = runnable.pop()
        actions, now = order[rank], clock[rank]
        while position[rank] < len(actions):
            stage, kind, index = actions[position[rank]]
            needed = None
            if kind == "F" and stage:
                needed = (stage - 1, "F", index)
            elif kind in "BI" and stage < last:
                needed = (stage + 1, "B", index)
            start = now
            if needed is not None:
                arrived = ready.get(needed)
                if arrived is None:
                    waiting[needed] = rank
                    break
                start = max(now, arrived + (0.0 if owner[needed[0]] == rank else message if kind == "F" else late))
            seconds = stages[stage].of(kind)
            now = start + seconds
            busy[rank] += seconds
            if keep:
                events.append((rank, stage, kind, index, start, now))
            position[rank] += 1
            if kind != "W":
                done = (stage, "F" if kind == "F" else "B", index)
                ready[done] = now
                woken = waiting.pop(done, None)
                if woken is not None and woken != rank:
                    runnable.append(woken)
        clock[rank] = now
    if any(done < len(actions) for done, actions in zip(position, order, strict=True)):
        raise ValueError("The order of actions deadlocks, because ranks wait for each other.")
    return Timeline(max(clock), tuple(busy), tuple(clock), tuple(events))


@lru_cache(maxsize=1024)
def in_flight(schedule: str, pp: int, vp: int, micro_batches: int) -> tuple[dict[int, int], ...]:
    """Return for each rank, by stage, the micro-batches whose activations live at once at the rank's peak. A forward adds one; B, or the W
    after an I, frees it."""
    ranks = []
    for actions in training_order(schedule, pp, vp, micro_batches):
        live: dict[int, int] = {}
        most: dict[int, int] = {}
        total = largest = 0
        for stage, kind, _ in actions:
            if kind == "F":
                live[stage] = live.get(stage, 0) + 1
                total += 1
                if total > largest:
                    largest, most = total, dict(live)
            elif kind in "BW":
                live[stage] -= 1
                total -= 1
        ranks.append(most)
    return tuple(ranks)
