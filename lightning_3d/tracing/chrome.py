"""The file of a traced step, in the Trace Event Format of Perfetto and chrome://tracing. Imports no
torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_3d.layout.layout import Layout
from lightning_3d.storage.json_file import replace_text
from lightning_3d.tracing.overlap import hidden_by_kind
from lightning_3d.tracing.trace import Event, Memory, RankTrace, StepTrace, Transfer, Work

MESSAGE, WAIT = "message", "wait"
"""Categories of what is no event of a step."""


def write_timeline(path: Path, trace: StepTrace) -> None:
    """Write a step, atomically: a reader never sees part of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(as_chrome(trace), separators=(",", ":")) + "\n")


def as_chrome(trace: StepTrace) -> dict[str, Any]:
    """Convert to the Trace Event Format: a process per rank, with a row for its step, one for its
    waits, some for each kind of messages.

    Times are microseconds from the first event. The rest is under `lightning_3d`.
    """
    layout = Layout.parse(trace.layout, order=trace.order)
    kept = [each for each in trace.ranks if each.events]
    starts = [each.start for rank in kept for each in rank.events or ()] + [
        each.start for rank in kept for each in rank.transfers or ()
    ]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for each in kept:
        place = " ".join(
            f"{axis}{index}"
            for axis, index in layout.coordinates(each.rank).items()
            if layout.size(axis) > 1
        )
        title = " ".join(filter(None, (f"rank {each.rank}", place, each.host)))
        events += [
            _meta(each.rank, 0, "process_name", name=title),
            _meta(each.rank, 0, "process_sort_index", sort_index=each.rank),
        ]
        events += [_meta(each.rank, 0, "thread_name", name="step")]
        events += [_step_event(each.rank, event, origin) for event in each.events or ()]
        events += _message_rows(each.rank, each.transfers or (), origin)
    shifted = (each.shifted(-origin) for each in trace.ranks)
    ranks = [
        {"rank": each.rank, "host": each.host, "memory": each.memory._asdict(), "work": each.work}
        for each in shifted
    ]
    about = {
        name: getattr(trace, name)
        for name in ("step", "layout", "order", "schedule", "bubble", "clock_error", "device")
    }
    hidden = {
        kind: {**one._asdict(), "share": one.share} for kind, one in hidden_by_kind(kept).items()
    }
    return {
        "displayTimeUnit": "ms",
        "traceEvents": events,
        "lightning_3d": {**about, "hidden": hidden, "ranks": ranks},
    }


def _meta(rank: int, row: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": args}


def _step_event(rank: int, event: Event, origin: float) -> dict[str, Any]:
    args = {"stage": event.stage, "micro_batch": event.micro_batch, "batch": event.batch}
    args = {key: value for key, value in args.items() if value is not None}
    return _complete(
        rank, 0, event.kind, event.kind, (event.start - origin, event.end - origin), args
    )


def _complete(
    rank: int, row: int, name: str, category: str, span: tuple[float, float], args: dict[str, Any]
) -> dict[str, Any]:
    start, end = (time * 1e6 for time in span)
    times = {"ts": round(start, 3), "dur": round(max(0.0, end - start), 3)}
    return {
        "ph": "X",
        "pid": rank,
        "tid": row,
        "name": name,
        "cat": category,
        **times,
        "args": args,
    }


def _message_rows(rank: int, transfers: Iterable[Transfer], origin: float) -> list[dict[str, Any]]:
    """Messages that are under way together are in rows of their own: in one row, events of this
    format must not overlap."""
    transfers = [each.shifted(-origin) for each in transfers]
    if not transfers:
        return []
    rows: list[dict[str, Any]] = [_meta(rank, 1, "thread_name", name="waits for messages")]
    rows += [
        _complete(rank, 1, each.kind, WAIT, each.wait, {})
        for each in transfers
        if each.wait is not None
    ]
    row = 2
    for kind in dict.fromkeys(each.kind for each in transfers):
        lanes = _lanes(
            sorted((each for each in transfers if each.kind == kind), key=lambda each: each.start)
        )
        for lane in lanes:
            rows.append(_meta(rank, row, "thread_name", name=kind))
            rows += [
                _complete(rank, row, kind, MESSAGE, (each.start, each.end), _about(each))
                for each in lane
            ]
            row += 1
    return [*rows, *(_meta(rank, tid, "thread_sort_index", sort_index=tid) for tid in range(row))]


def _lanes(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    lanes: list[list[Transfer]] = []
    for each in transfers:
        free = next((lane for lane in lanes if lane[-1].end <= each.start), None)
        if free is None:
            lanes.append([each])
        else:
            free.append(each)
    return lanes


def _about(transfer: Transfer) -> dict[str, Any]:
    about = {
        "bytes": transfer.size,
        "operation": transfer.operation,
        "group": transfer.group,
        "ranks": transfer.ranks,
    }
    return {**about, "launched": transfer.launched, "wait": transfer.wait, "exact": transfer.exact}


def read_timeline(path: Path) -> StepTrace | None:
    """Read the step in a file, in seconds from its first event; None if there is no readable
    one."""
    try:
        content = json.loads(path.read_text("utf-8"))
        about = content["lightning_3d"]
        events: dict[int, list[Event]] = {}
        transfers: dict[int, list[Transfer]] = {}
        for entry in content["traceEvents"]:
            if entry["ph"] == "X" and entry["cat"] == MESSAGE:
                transfers.setdefault(entry["pid"], []).append(_read_transfer(entry))
            elif entry["ph"] == "X" and entry["cat"] != WAIT:
                events.setdefault(entry["pid"], []).append(_read_event(entry))
        ranks = tuple(
            RankTrace(
                each["rank"],
                each["host"],
                Memory(**each["memory"]),
                tuple(Work(*work) for work in each["work"]),
                tuple(events[each["rank"]]) if each["rank"] in events else None,
                (
                    tuple(sorted(transfers.get(each["rank"], ()), key=lambda one: one.start))
                    if each["rank"] in events
                    else None
                ),
            )
            for each in about["ranks"]
        )
        known = (about["step"], about["layout"], tuple(about["order"]), about["schedule"])
        return StepTrace(*known, ranks, about["clock_error"], about["device"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_event(entry: dict[str, Any]) -> Event:
    args, start = entry["args"], entry["ts"] / 1e6
    return Event(
        entry["name"],
        args.get("stage"),
        args.get("micro_batch"),
        args["batch"],
        start,
        start + entry["dur"] / 1e6,
    )


def _read_transfer(entry: dict[str, Any]) -> Transfer:
    args, start = entry["args"], entry["ts"] / 1e6
    wait = args["wait"] and (args["wait"][0], args["wait"][1])
    what = args["operation"], args["group"], tuple(args["ranks"]), args["bytes"]
    return Transfer(*what, start, args["launched"], start + entry["dur"] / 1e6, wait, args["exact"])
