"""Who holds up a run: compares what the ranks say of themselves. Imports no torch.

A rank waits for others in a collective that they have not called, or for a message of the pipeline.
A rank that others wait for and that waits for nobody is the cause. Where all wait for each other,
they have called collectives in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.errors import listed
from lightning_3d.health.rank_report import GroupState, LastCollective, RankStatus

_MOST_NAMED = 4


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        ranks: the ranks that it waits for.
        what: in words, such as "in collective 7 (...) of group tp (...)", or "for the activation of
            ...".
    """

    ranks: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Verdict:
    """The cause of a hang.

    Attributes:
        text: one message, without the places of files.
        ranks: the ranks that hold up the others; all of them where they wait for each other.
        certain: False if a rank that holds up the others may still make progress by itself.
    """

    text: str
    ranks: tuple[int, ...]
    certain: bool


def judge(reports: Mapping[int, RankStatus], silent: Mapping[int, str]) -> Verdict:
    """Find the cause of a hang.

    Args:
        reports: by rank.
        silent: what is known of the ranks that have sent none, by rank, such as "it is stopped
            (SIGSTOP)".
    """
    if silent:
        return Verdict(_silent(reports, silent), tuple(sorted(silent)), True)
    mismatch = _mismatch(reports)
    if mismatch is not None:
        return mismatch
    waits = {
        rank: wait
        for rank, report in sorted(reports.items())
        if (wait := _wait(report, reports)) is not None
    }
    awaited = {rank for wait in waits.values() for rank in wait.ranks}
    causes = tuple(sorted(rank for rank in awaited if rank not in waits))
    if causes:
        return Verdict(
            _held_up(reports, waits, causes),
            causes,
            all(reports[rank].overdue for rank in causes if rank in reports),
        )
    if awaited:
        return Verdict(_circle(waits), tuple(sorted(waits)), True)
    idle = tuple(sorted(rank for rank, report in reports.items() if report.overdue))
    return Verdict(_together(reports, idle), idle, True)


def _wait(report: RankStatus, reports: Mapping[int, RankStatus]) -> Wait | None:
    """What a rank waits for: the oldest of its collectives that others have not called, or a
    message.

    A rank that computes waits for nothing, although a collective that it has begun may still run
    beside it.
    """
    if report.waits_for is not None:
        sender, message = report.waits_for
        return Wait((sender,), f"for {message}")
    if not report.blocked:
        return None
    for name, group in report.groups.items():
        pending = group.oldest_pending
        if pending is None:
            continue
        missing = tuple(
            rank
            for rank in group.ranks
            if rank != report.rank and _called(reports.get(rank), name) < pending.number
        )
        if missing:
            return Wait(missing, f"in {_numbered(pending)} of {group.words}")
    return None


def _called(report: RankStatus | None, name: str) -> int:
    group = report.groups.get(name) if report is not None else None
    return group.called if group is not None else 0


def _numbered(one: LastCollective) -> str:
    return f"collective {one.number} ({one.words})"


def _mismatch(reports: Mapping[int, RankStatus]) -> Verdict | None:
    """Ranks that call different collectives where one is expected."""
    names = {
        name
        for report in reports.values()
        for name, group in report.groups.items()
        if group.oldest_pending is not None
    }
    for name in sorted(names):
        members = {
            rank: report.groups[name] for rank, report in reports.items() if name in report.groups
        }
        first = min(
            group.oldest_pending.number
            for group in members.values()
            if group.oldest_pending is not None
        )
        calls: dict[str, list[int]] = {}
        for rank, group in sorted(members.items()):
            if (one := group.find(first)) is not None:
                calls.setdefault(one.words, []).append(rank)
        if len(calls) > 1 and _must_be_equal(calls):
            return Verdict(
                _different(reports, calls, first, next(iter(members.values()))),
                tuple(sorted(members)),
                True,
            )
    return None


def _must_be_equal(calls: Mapping[str, list[int]]) -> bool:
    """Whether calls with other inputs cannot belong together: parts of all_to_all may differ in
    size, and only one rank scatters."""
    kinds = {call.partition(" of ")[0] for call in calls}
    return len(kinds) > 1 or not kinds & {"all_to_all", "scatter", "gather"}


def _different(
    reports: Mapping[int, RankStatus],
    calls: Mapping[str, list[int]],
    number: int,
    group: GroupState,
) -> str:
    parts = [
        f"{_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {what}"
        for what, ranks in calls.items()
    ]
    places = [_place(reports[ranks[0]]) for ranks in calls.values()]
    return (
        f"the ranks of {group.words} do not call the same collective as its number {number}:"
        f" {listed(parts)}. {' '.join(places)} All ranks of a group must call the same collectives"
        " in the same order, with the same shapes."
    )


def _held_up(
    reports: Mapping[int, RankStatus], waits: Mapping[int, Wait], causes: tuple[int, ...]
) -> str:
    waiting = next(rank for rank, wait in waits.items() if set(wait.ranks) & set(causes))
    parts = [
        f"rank {waiting} has waited for {_ranks(causes)} for {reports[waiting].seconds:.0f} s,"
        f" {waits[waiting].what}."
    ]
    parts += [_place(reports[rank]) for rank in causes[:_MOST_NAMED] if rank in reports]
    return " ".join(parts)


def _silent(reports: Mapping[int, RankStatus], silent: Mapping[int, str]) -> str:
    parts = [
        f"rank {rank} does not answer: {why}." for rank, why in sorted(silent.items())[:_MOST_NAMED]
    ]
    parts += (
        [f"{len(silent) - _MOST_NAMED} more do not answer."] if len(silent) > _MOST_NAMED else []
    )
    for rank, report in sorted(reports.items()):
        wait = _wait(report, reports)
        if wait is not None and set(wait.ranks) & set(silent):
            parts.append(f"Rank {rank} has waited for it for {report.seconds:.0f} s, {wait.what}.")
            break
    return " ".join(parts)


def _circle(waits: Mapping[int, Wait]) -> str:
    parts = [
        f"rank {rank} waits for {_ranks(wait.ranks)} {wait.what}"
        for rank, wait in list(waits.items())[:_MOST_NAMED]
    ]
    return (
        f"ranks wait for each other: {listed(parts)}. They have called collectives in another"
        " order."
    )


def _together(reports: Mapping[int, RankStatus], idle: tuple[int, ...]) -> str:
    if not idle:
        return "no rank makes progress, and none waits for another."
    first = reports[idle[0]]
    pending = next(
        (group for group in first.groups.values() if group.oldest_pending is not None), None
    )
    if pending is None:
        return (
            f"{_ranks(idle)} {'does' if len(idle) == 1 else 'do'} not make progress, and nobody"
            f" waits for another rank. {_place(first)}"
        )
    assert pending.oldest_pending is not None
    return (
        f"all ranks of {pending.words} have called {_numbered(pending.oldest_pending)}, but it does"
        f" not end, for {first.seconds:.0f} s. Look at the network and the GPUs between them:"
        " lightning-3d doctor."
    )


def _place(report: RankStatus) -> str:
    where = f", at {report.where}" if report.where else ""
    return (
        f"Rank {report.rank} ({report.host}) is in {report.activity}, for {report.seconds:.0f}"
        f" s{where}."
    )


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    shown = [str(rank) for rank in ranks[:_MOST_NAMED]]
    shown += [f"{len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else []
    return f"rank{'s' * (len(ranks) > 1)} {listed(shown)}"
