"""Observes this rank from another thread: what its main thread does, and which collectives it has
called."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from itertools import groupby
from pathlib import Path
from types import FrameType

from lightning_3d.compat.flight_recorder import (
    RecordedCollective,
    group_members,
    recorded_collectives,
)
from lightning_3d.health.rank_report import GroupState, LastCollective, RankStatus
from lightning_3d.ranks.heartbeat import Heartbeat

MOST_SHOWN = 100
"""Collectives of each group that a file shows."""

_MOST_SENT = 12
_OURS = f"{os.sep}lightning_3d{os.sep}"
_LIBRARIES = (
    f"{os.sep}torch{os.sep}",
    f"{os.sep}lightning{os.sep}",
    f"{os.sep}threading.py",
    f"{os.sep}contextlib.py",
    _OURS,
)
_TRAINER = os.path.join("lightning", "pytorch", "trainer", "trainer.py")
_BLOCKING = (os.path.join("torch", "distributed"), _OURS)


def observe(rank: int, heartbeat: Heartbeat, *, overdue: bool) -> RankStatus:
    """Describe what this rank does.

    Args:
        overdue: whether it takes longer than it may.
    """
    where, blocked = _main_thread()
    members = group_members()
    groups = {
        name: _state(list(calls), members.get(name, ()))
        for name, calls in _by_group(recorded_collectives())
    }
    return RankStatus(
        rank,
        socket.gethostname(),
        heartbeat.describe(),
        time.monotonic() - heartbeat.since,
        where,
        blocked,
        overdue,
        heartbeat.waits_for,
        {name: group for name, group in groups.items() if len(group.ranks) > 1},
    )


def write_report(path: Path, report: RankStatus) -> None:
    """Write what a rank does, its last collectives and the stacks of all its threads. A rank that
    is ended meanwhile leaves the report that it wrote before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".partial")
    with draft.open("w", encoding="utf-8") as file:
        file.write(
            f"rank {report.rank} on {report.host}, process {os.getpid()}: {report.activity}, for"
            f" {report.seconds:.1f} s\n"
        )
        for _, calls in _by_group(recorded_collectives()):
            shown = list(calls)[-MOST_SHOWN:]
            file.write(f"\nlast collectives of group {shown[0].purpose or shown[0].group}:\n")
            file.writelines(
                f"{one.number:8d}  {'done' if one.done else 'PENDING':7s}  {one.kind} {one.shape}\n"
                for one in shown
            )
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    draft.replace(path)


def _by_group(calls: list[RecordedCollective]) -> list[tuple[str, list[RecordedCollective]]]:
    ordered = sorted(
        (one for one in calls if not one.message), key=lambda one: (one.group, one.number)
    )
    return [(name, list(found)) for name, found in groupby(ordered, key=lambda one: one.group)]


def _state(calls: list[RecordedCollective], ranks: tuple[int, ...]) -> GroupState:
    """The calls from the oldest that is pending on, and a few before."""
    pending = next((index for index, one in enumerate(calls) if not one.done), len(calls) - 1)
    kept = calls[max(0, pending - 2) :][:_MOST_SENT]
    if calls[-1] not in kept:
        kept.append(calls[-1])
    last = tuple(LastCollective(one.number, one.kind, one.shape, not one.done) for one in kept)
    return GroupState(
        "of all ranks" if calls[0].purpose == "default_pg" else calls[0].purpose, ranks, last
    )


def _main_thread() -> tuple[str, bool]:
    """Return the place of the main thread in the user's code, and whether it is blocked."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", False
    blocked = any(part in frame.f_code.co_filename for part in _BLOCKING)
    shown = _innermost_of_user(frame) or frame
    return f"{shown.f_code.co_filename}:{shown.f_lineno} in {shown.f_code.co_name}", blocked


def _innermost_of_user(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code inside of the Trainer; None where there is
    none."""
    while frame is not None and not frame.f_code.co_filename.endswith(_TRAINER):
        if not any(part in frame.f_code.co_filename for part in _LIBRARIES):
            return frame
        frame = frame.f_back
    return None
