"""A traced step: events, messages, memory and bubble of all ranks. Imports no torch.

The bubble of a step is measured in its pipeline part. Of every pipeline (ranks that differ in `pp`
only) and batch that is the time from the start of its first action to the end of its last, on
whichever ranks; actions are forward, backward, gradients of inputs and of weights, and what follows
them for the reduction of the stage's gradients. The bubble is the share of that time, summed over
all ranks, in which a rank is in no action: it waits for a message, hands one over, or has nothing
to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lightning_3d.layout.layout import Layout

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (
    "forward",
    "backward",
    "input gradient",
    "weight gradient",
)
SEND, RECEIVE, REDUCE, OPTIMIZER = "send", "receive", "reduce", "optimizer"
KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, SEND, RECEIVE, REDUCE, OPTIMIZER)
"""Kinds of events. A split backward has an input gradient (which the previous stage waits for) and
a weight gradient. receive is the wait for a message, send its start, reduce the reduction of
gradients; optimizer is gradient norm, clipping and step."""

MOST_RANKS = 64
"""Most ranks whose events are kept. Bubble and memory cover all ranks."""

TIMELINE_FILE = "timeline.json"


class Event(NamedTuple):
    """One event of a rank, in seconds. `stage` and `micro_batch` are None if it has none; `batch`
    is the batch within the step."""

    kind: str
    stage: int | None
    micro_batch: int | None
    batch: int
    start: float
    end: float


class Transfer(NamedTuple):
    """One message of a rank, in seconds.

    Attributes:
        operation: such as "all-reduce".
        group: axes of the layout that the ranks differ in, or what the group was made for.
        ranks: global ranks of the group.
        size: bytes of this rank's tensor.
        start, launched, end: when the rank began to start it, when it had done so and computed
            again, and when the message had arrived. On a GPU, `launched` is `start`.
        wait: when the rank (on a GPU: its stream) began and ended to wait for it; None if it did
            not.
        exact: False if the arrival was not reported; `end` is then the end of the wait.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    size: int
    start: float
    launched: float
    end: float
    wait: tuple[float, float] | None
    exact: bool

    @property
    def kind(self) -> str:
        """Operation and group."""
        return f"{self.operation} over {self.group}"

    def shifted(self, seconds: float) -> Transfer:
        """Shift the times to another clock."""
        wait = self.wait and (self.wait[0] + seconds, self.wait[1] + seconds)
        return self._replace(
            start=self.start + seconds,
            launched=self.launched + seconds,
            end=self.end + seconds,
            wait=wait,
        )


class Memory(NamedTuple):
    """Bytes of a rank by category; None for a category that was not counted."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + (self.activations or 0)


class Work(NamedTuple):
    """Work of a rank in the pipeline part of one batch: start of its first action, end of its last,
    seconds in actions."""

    first: float
    last: float
    busy: float


@dataclass(frozen=True)
class RankTrace:
    """Report of one rank on a step. `events` and `transfers` are None if they are not kept."""

    rank: int
    host: str
    memory: Memory
    work: tuple[Work, ...]
    events: tuple[Event, ...] | None = None
    transfers: tuple[Transfer, ...] | None = None

    def shifted(self, seconds: float) -> RankTrace:
        """Shift the times to another clock."""
        work = tuple(
            Work(each.first + seconds, each.last + seconds, each.busy) for each in self.work
        )
        events = self.events and tuple(
            event._replace(start=event.start + seconds, end=event.end + seconds)
            for event in self.events
        )
        transfers = self.transfers and tuple(each.shifted(seconds) for each in self.transfers)
        return replace(self, work=work, events=events, transfers=transfers)


@dataclass(frozen=True)
class StepTrace:
    """A traced step.

    Attributes:
        step: number of the step; the first is 1.
        layout, order, schedule: those of the run.
        ranks: all ranks in order, with times of rank 0's clock.
        clock_error: possible error in seconds between times of different machines.
        device: "cpu" or "cuda". Activations are everything in no other category.
    """

    step: int
    layout: str
    order: tuple[str, ...]
    schedule: str
    ranks: tuple[RankTrace, ...]
    clock_error: float = 0.0
    device: str = "cpu"
    bubble: float = field(init=False)

    def __post_init__(self) -> None:
        work = {each.rank: each.work for each in self.ranks}
        object.__setattr__(
            self, "bubble", measured_bubble(work, Layout.parse(self.layout, order=self.order))
        )

    @property
    def peak_memory(self) -> int:
        """Peak bytes of the rank that used most memory."""
        return max(each.memory.total for each in self.ranks)


def is_action(event: Event) -> bool:
    """Return whether an event is work for the pipeline."""
    return event.stage is not None and event.kind not in (SEND, RECEIVE)


def work_of(events: Iterable[Event]) -> tuple[Work, ...]:
    """Summarize a rank's events for the bubble, for each batch of the step."""
    batches: dict[int, list[Event]] = {}
    for event in events:
        if is_action(event):
            batches.setdefault(event.batch, []).append(event)
    return tuple(
        Work(
            min(event.start for event in each),
            max(event.end for event in each),
            sum(event.end - event.start for event in each),
        )
        for _, each in sorted(batches.items())
    )


def measured_bubble(work: Mapping[int, Sequence[Work]], layout: Layout) -> float:
    """Idle share of rank-time in the pipeline part of a step, 0 to 1: see this module's
    description."""
    idle = total = 0.0
    for pipeline in layout.groups("pp"):
        for batch in zip(*(work[rank] for rank in pipeline), strict=True):
            length = max(each.last for each in batch) - min(each.first for each in batch)
            total += length * len(batch)
            idle += sum(length - each.busy for each in batch)
    return idle / total if total > 0 else 0.0


def chosen_ranks(layout: Layout) -> frozenset[int]:
    """Choose the ranks whose events are kept: all, or as many whole pipelines as `MOST_RANKS`
    allows, at least one."""
    ranks = pipeline_by_pipeline(layout)
    return frozenset(ranks[: max(1, MOST_RANKS // layout.pp) * layout.pp])


def group_name(layout: Layout, transfer: Transfer) -> str:
    """Name the group of a message by the axes that its ranks differ in; by what it was made for
    where it is only a part of these ranks."""
    places = [layout.coordinates(rank) for rank in transfer.ranks]
    axes = [axis for axis in layout.order if len({place[axis] for place in places}) > 1]
    whole = sorted(transfer.ranks) == sorted(layout.group_of(transfer.ranks[0], *axes))
    return "+".join(axes) if whole else transfer.group


def pipeline_by_pipeline(layout: Layout) -> list[int]:
    """List all ranks, pipeline by pipeline; the first tensor- and context-parallel ranks come
    before others."""
    places = {pipeline: layout.coordinates(pipeline[0]) for pipeline in layout.groups("pp")}
    pipelines = sorted(
        places, key=lambda pipeline: (places[pipeline]["tp"] + places[pipeline]["cp"] > 0, pipeline)
    )
    return [rank for pipeline in pipelines for rank in pipeline]
