"""How much of the time of messages lay beside the computation of their rank. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_3d.tracing.trace import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    OPTIMIZER,
    WEIGHT_GRADIENT,
    Event,
    RankTrace,
    Transfer,
)

COMPUTES = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, OPTIMIZER)
"""Kinds of events in which a rank computes, except while it waits for a message."""

Span = tuple[float, float]


class Hidden(NamedTuple):
    """Messages of one kind.

    Attributes:
        messages: their number, over all ranks.
        size: their bytes.
        seconds: time under way, added up over messages.
        hidden: the part of that time in which the rank computed.
        waited: time in which the rank waited for them.
    """

    messages: int = 0
    size: int = 0
    seconds: float = 0.0
    hidden: float = 0.0
    waited: float = 0.0

    @property
    def share(self) -> float:
        """Part of the time under way in which the rank computed, 0 to 1."""
        return self.hidden / self.seconds if self.seconds > 0 else 0.0


def hidden_by_kind(ranks: Iterable[RankTrace]) -> dict[str, Hidden]:
    """Add up the messages of all ranks by kind; the kind that takes longest comes first."""
    found: dict[str, Hidden] = {}
    for each in ranks:
        transfers = each.transfers or ()
        computing = computing_spans(each.events or (), transfers)
        for transfer in transfers:
            so_far = found.get(transfer.kind, Hidden())
            waited = transfer.wait[1] - transfer.wait[0] if transfer.wait else 0.0
            found[transfer.kind] = Hidden(
                so_far.messages + 1,
                so_far.size + transfer.size,
                so_far.seconds + transfer.end - transfer.start,
                so_far.hidden + length_within(transfer.start, transfer.end, computing),
                so_far.waited + waited,
            )
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def computing_spans(events: Iterable[Event], transfers: Iterable[Transfer]) -> list[Span]:
    """Return the times in which a rank computes: inside of its actions, but not while it starts a
    message or waits for one."""
    transfers = list(transfers)
    active = union((event.start, event.end) for event in events if event.kind in COMPUTES)
    waits = [transfer.wait for transfer in transfers if transfer.wait is not None]
    starts = [
        (transfer.start, transfer.launched)
        for transfer in transfers
        if transfer.start < transfer.launched
    ]
    return without(active, union([*waits, *starts]))


def union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that overlap."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def without(spans: Sequence[Span], taken: Sequence[Span]) -> list[Span]:
    """Remove `taken` from `spans`; both are rising and disjoint."""
    left: list[Span] = []
    place = 0
    for start, end in spans:
        while place < len(taken) and taken[place][1] <= start:
            place += 1
        for first, last in taken[place:]:
            if first >= end:
                break
            if first > start:
                left.append((start, first))
            start = max(start, last)
        if start < end:
            left.append((start, end))
    return left


def length_within(start: float, end: float, spans: Sequence[Span]) -> float:
    """Length of the part of [start, end] that is inside of spans, which are rising and disjoint."""
    place = max(0, bisect_right(spans, (start, start)) - 1)
    total = 0.0
    for first, last in spans[place:]:
        if first >= end:
            break
        total += max(0.0, min(end, last) - max(start, first))
    return total


def summary(ranks: Iterable[RankTrace]) -> list[str]:
    """Describe each kind of messages in a line, such as "all-reduce over dp: 24 messages, hidden 83
    %"."""
    return [
        f"{kind}: {one.messages} message{'s' * (one.messages != 1)}, {one.size / 2**20:.2f} MiB,"
        f" hidden {one.share:.0%}"
        for kind, one in hidden_by_kind(ranks).items()
    ]
