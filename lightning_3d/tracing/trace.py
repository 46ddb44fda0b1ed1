"""A traced step: events, memory and bubble of all ranks, and their file. Imports no torch.

The bubble of a step is measured in its pipeline part. Of every pipeline (ranks that differ in `pp` only) and batch that is the time
from the start of its first action to the end of its last, on whichever ranks; actions are forward, backward, gradients of inputs and of
weights, and what follows them for the reduction of the stage's gradients. The bubble is the share of that time, summed over all ranks, in
which a rank is in no action: it waits for a message, hands one over, or has nothing to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_3d.layout.layout import Layout

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "backward", "input gradient", "weight gradient"
SEND, RECEIVE, REDUCE, OPTIMIZER = "send", "receive", "reduce", "optimizer"
KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, SEND, RECEIVE, REDUCE, OPTIMIZER)
"""Kinds of events. A split backward has an input gradient (which the previous stage waits for) and a weight gradient. receive is the
wait for a message, send its start, reduce the reduction of gradients; optimizer is gradient norm, clipping and step."""

MOST_RANKS = 64
"""Most ranks whose events are kept. Bubble and memory cover all ranks."""

TIMELINE_FILE = "timeline.json"


class Event(NamedTuple):
    """One event of a rank, in seconds. `stage` and `micro_batch` are None if it has none; `batch` is the batch within the step."""

    kind: str
    stage: int | None
    micro_batch: int | None
    batch: int
    start: float
    end: float


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
    """Work of a rank in the pipeline part of one batch: start of its first action, end of its last, seconds in actions."""

    first: float
    last: float
    busy: float


@dataclass(frozen=True)
class RankTrace:
    """Report of one rank on a step. `events` is None if they are not kept."""

    rank: int
    host: str
    memory: Memory
    work: tuple[Work, ...]
    events: tuple[Event, ...] | None = None

    def shifted(self, seconds: float) -> RankTrace:
        """Shift the times to another clock."""
        work = tuple(Work(each.first + seconds, each.last + seconds, each.busy) for each in self.work)
        events = self.events and tuple(event._replace(start=event.start + seconds, end=event.end + seconds) for event in self.events)
        return replace(self, work=work, events=events)


@dataclass(frozen=True)
class StepTrace:
    """A traced step.

    Attributes:
        step: number of the step; the first is 1.
        layout, order, schedule: those of the run.
        ranks: all ranks in order, with times of rank 0's clock.
        clock_error: possible error in seconds between times of different machines.
        device: "cpu" or "cuda". With "cuda" activations are everything in no other category, else what the backward keeps.
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
        object.__setattr__(self, "bubble", measured_bubble(work, Layout.parse(self.layout, order=self.order)))

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
        Work(min(event.start for event in each), max(event.end for event in each), sum(event.end - event.start for event in each))
        for _, each in sorted(batches.items())
    )


def measured_bubble(work: Mapping[int, Sequence[Work]], layout: Layout) -> float:
    """Idle share of rank-time in the pipeline part of a step, 0 to 1: see this module's description."""
    idle = total = 0.0
    for pipeline in layout.groups("pp"):
        for batch in zip(*(work[rank] for rank in pipeline), strict=True):
            length = max(each.last for each in batch) - min(each.first for each in batch)
            total += length * len(batch)
            idle += sum(length - each.busy for each in batch)
    return idle / total if total > 0 else 0.0


def chosen_ranks(layout: Layout) -> frozenset[int]:
    """Choose the ranks whose events are kept: all, or as many whole pipelines as `MOST_RANKS` allows, at least one."""
    ranks = pipeline_by_pipeline(layout)
    return frozenset(ranks[: max(1, MOST_RANKS // layout.pp) * layout.pp])


def pipeline_by_pipeline(layout: Layout) -> list[int]:
    """List all ranks, pipeline by pipeline; the first tensor- and context-parallel ranks come before others."""
    places = {pipeline: layout.coordinates(pipeline[0]) for pipeline in layout.groups("pp")}
    pipelines = sorted(places, key=lambda pipeline: (places[pipeline]["tp"] + places[pipeline]["cp"] > 0, pipeline))
    return [rank for pipeline in pipelines for rank in pipeline]


# The file


def write_timeline(path: Path, trace: StepTrace) -> None:
    """Write a step in the Trace Event Format of Perfetto and chrome://tracing, atomically: a reader never sees part of a file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(json.dumps(as_chrome(trace), separators=(",", ":")) + "\n", encoding="utf-8")
    os.replace(draft, path)


def as_chrome(trace: StepTrace) -> dict[str, Any]:
    """Convert to the Trace Event Format: a process per rank, times in microseconds from the first event; the rest under `lightning_3d`."""
    layout = Layout.parse(trace.layout, order=trace.order)
    kept = [each for each in trace.ranks if each.events]
    origin = min((event.start for each in kept for event in each.events or ()), default=0.0)
    events: list[dict[str, Any]] = []
    for each in kept:
        place = " ".join(f"{axis}{index}" for axis, index in layout.coordinates(each.rank).items() if layout.size(axis) > 1)
        title = " ".join(filter(None, (f"rank {each.rank}", place, each.host)))
        names: dict[str, dict[str, Any]] = {"process_name": {"name": title}, "process_sort_index": {"sort_index": each.rank}}
        names |= {"thread_name": {"name": "step"}}
        events += [{"ph": "M", "pid": each.rank, "tid": 0, "name": name, "args": args} for name, args in names.items()]
        events += [_chrome_event(each.rank, event, origin) for event in each.events or ()]
    shifted = (each.shifted(-origin) for each in trace.ranks)
    ranks = [{"rank": each.rank, "host": each.host, "memory": each.memory._asdict(), "work": each.work} for each in shifted]
    about = {name: getattr(trace, name) for name in ("step", "layout", "order", "schedule", "bubble", "clock_error", "device")}
    return {"displayTimeUnit": "ms", "traceEvents": events, "lightning_3d": {**about, "ranks": ranks}}


def _chrome_event(rank: int, event: Event, origin: float) -> dict[str, Any]:
    args = {"stage": event.stage, "micro_batch": event.micro_batch, "batch": event.batch}
    start, end = ((time - origin) * 1e6 for time in (event.start, event.end))
    return {
        "ph": "X", "pid": rank, "tid": 0, "name": event.kind, "cat": event.kind, "ts": round(start, 3), "dur": round(end - start, 3),
        "args": {key: value for key, value in args.items() if value is not None},
    }


def read_timeline(path: Path) -> StepTrace | None:
    """Read the step in a file, in seconds from its first event; None if there is no readable one."""
    try:
        content = json.loads(path.read_text("utf-8"))
        about = content["lightning_3d"]
        events: dict[int, list[Event]] = {}
        for entry in content["traceEvents"]:
            if entry["ph"] == "X":
                args, start = entry["args"], entry["ts"] / 1e6
                event = Event(entry["name"], args.get("stage"), args.get("micro_batch"), args["batch"], start, start + entry["dur"] / 1e6)
                events.setdefault(entry["pid"], []).append(event)
        ranks = tuple(
            RankTrace(
                each["rank"], each["host"], Memory(**each["memory"]), tuple(Work(*work) for work in each["work"]),
                tuple(events[each["rank"]]) if each["rank"] in events else None,
            )
            for each in about["ranks"]
        )
        known = (about["step"], about["layout"], tuple(about["order"]), about["schedule"])
        return StepTrace(*known, ranks, about["clock_error"], about["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
