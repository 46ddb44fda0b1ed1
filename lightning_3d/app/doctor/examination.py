"""Run all checks on all ranks, one check after the other. Rank 0 judges, and names the ranks that
are silent.

Before each check rank 0 posts which ranks take part. Each rank measures with a time limit and posts
what it found; a rank that posts nothing in time is silent, and takes no part in later checks. No
step uses a collective, except the checks of collectives themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from lightning_3d.app.doctor.board import DoctorBoard, Unreachable
from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room, Setup
from lightning_3d.app.doctor.findings import (
    UNKNOWN,
    WRONG,
    DoctorFinding,
    RankPlace,
    RankPlaces,
    worst,
)
from lightning_3d.app.doctor.time_limit import TimeLimit, within
from lightning_3d.ranks.environment import OutsideRank
from lightning_3d.ranks.progress import task

_MARGIN_SECONDS = 2.0
"""Time from the end of a rank's time limit until its post counts as missing."""
_LEAD_SECONDS = 20.0
"""Time for rank 0 to judge, and to show the report, in addition to the time limits of the ranks."""


@dataclass
class Report:
    """What was found.

    Attributes:
        setup: what was examined.
        places: hosts of the ranks.
        findings: findings of each check, by name.
        facts: what every rank measured, by check and rank.
        silent: ranks that did not answer.
        hung: ranks that answered, but have a check that has not ended.
        seconds: duration.
    """

    setup: Setup
    places: RankPlaces
    findings: dict[str, list[DoctorFinding]] = field(default_factory=dict)
    facts: dict[str, dict[int, Facts]] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """1 if something is wrong, else 0."""
        return int(any(worst(findings) == WRONG for findings in self.findings.values()))


def examine(
    setup: Setup, checks: Sequence[Check], me: OutsideRank, board: DoctorBoard
) -> Report | int:
    """Run the checks together with all other ranks.

    Args:
        setup: what to examine.
        checks: the checks, in order; the same on all ranks.
        me: this rank.
        board: board that all ranks share.

    Returns:
        On rank 0 the report; elsewhere the exit code, when rank 0 has posted it with `dismiss`.

    Raises:
        Unreachable: rank 0 does not answer.
    """
    room = Room(setup, me.rank, me.world_size, me.local_rank, board)
    board.post(
        f"here/{me.rank}",
        asdict(RankPlace(me.rank, os.uname().nodename, me.local_rank, os.getpid())),
    )
    if me.rank > 0:
        return _follow(room, checks)
    return _Lead(room, me.local_world_size).run(checks)


def dismiss(board: DoctorBoard, report: Report) -> None:
    """Post the exit code, and wait a moment until the ranks that answered have read it: rank 0 may
    serve the board."""
    board.post("exit code", report.exit_code)
    others = [rank for rank in report.places.by_rank if rank > 0 and rank not in report.silent]
    board.wait_for_all([f"left/{rank}" for rank in others], _MARGIN_SECONDS)


def _follow(room: Room, checks: Sequence[Check]) -> int:
    """Measure when rank 0 says so; return the exit code."""
    patience = 2 * room.setup.limit + _LEAD_SECONDS
    try:
        leaders = room.board.wait("leaders", patience)
        for check in checks:
            room.present = room.board.wait(f"{check.name}/go", patience)
            room.leaders = [rank for rank in leaders if rank in room.present]
            if room.present:
                room.board.post(f"{check.name}/{room.rank}", _measured(check, room))
        code = int(room.board.wait("exit code", patience))
        room.board.post(f"left/{room.rank}", True)
    except TimeLimit:
        host = (room.board.read("here/0") or {}).get("host", "its host")
        raise Unreachable(
            f"Rank 0 on {host} did not answer within {patience:g} s. Look at this process there."
        ) from None
    return code


def _measured(check: Check, room: Room) -> Facts:
    """Measure with a time limit. Whatever goes wrong is a fact."""
    room.now = ""
    started = time.monotonic()
    try:
        return {
            "facts": within(room.setup.limit, lambda: check.measure(room)),
            "seconds": time.monotonic() - started,
        }
    except TimeLimit:
        return {"hangs": room.now or check.name}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:300]}


class _Lead:
    """Rank 0 during the checks."""

    def __init__(self, room: Room, per_host: int) -> None:
        self._room, self._started = room, time.monotonic()
        keys = {f"here/{rank}": rank for rank in range(room.world_size)}
        with task("waiting for all ranks"):
            posts = room.board.wait_for_all(keys, room.setup.limit)
        places = RankPlaces(
            [RankPlace(**post) for post in posts.values()], room.world_size, per_host
        )
        self._report = Report(room.setup, places)
        self._report.silent = {rank: "" for key, rank in keys.items() if key not in posts}
        room.board.post("leaders", places.leaders())

    def run(self, checks: Sequence[Check]) -> Report:
        """Run all checks and return the report."""
        report = self._report
        for check in checks:
            lacking = sorted({*report.silent, *report.hung})
            self._room.present = (
                []
                if check.together and lacking
                else sorted(set(report.places.by_rank) - set(report.silent))
            )
            self._room.leaders = [
                rank for rank in report.places.leaders() if rank not in report.silent
            ]
            self._room.board.post(f"{check.name}/go", self._room.present)
            if self._room.present:
                with task(f"checking {check.name}"):
                    report.findings[check.name] = self._check(check)
            else:
                why = (
                    f"not measured, because {report.places.describe(lacking)} did not answer before"
                )
                report.findings[check.name] = [DoctorFinding(check.name, UNKNOWN, why)]
        report.findings = {"ranks": self._presence(), **report.findings}
        report.seconds = time.monotonic() - self._started
        return report

    def _check(self, check: Check) -> list[DoctorFinding]:
        report, limit = self._report, self._room.setup.limit
        keys = {
            f"{check.name}/{rank}": rank
            for rank in report.places.by_rank
            if rank > 0 and rank not in report.silent
        }
        deadline = time.monotonic() + limit + _MARGIN_SECONDS
        own = _measured(check, self._room)
        found = self._room.board.wait_for_all(
            keys, max(_MARGIN_SECONDS, deadline - time.monotonic())
        )
        posts = {0: own, **{rank: found[key] for key, rank in keys.items() if key in found}}
        report.silent.update({rank: check.name for key, rank in keys.items() if key not in found})
        facts = {rank: post["facts"] for rank, post in posts.items() if "facts" in post}
        report.facts[check.name] = facts
        findings = self._failed(check, posts)
        if facts and not (check.together and len(facts) < self._room.world_size):
            findings += check.judge(
                GatheredAnswers(self._room.setup, report.places, facts, report.facts)
            )
        return findings

    def _failed(self, check: Check, posts: Mapping[int, Facts]) -> list[DoctorFinding]:
        """Name the ranks on which a check did not end, or failed."""
        places, findings = self._report.places, []
        for key, meaning, advice in (
            (
                "hangs",
                "has not ended after {limit:g} s: {value}",
                "Look at these processes; --limit gives a check more time.",
            ),
            ("error", "failed: {value}", "Look at this error first."),
        ):
            values: dict[str, list[int]] = {}
            for rank, post in posts.items():
                if key in post:
                    values.setdefault(post[key], []).append(rank)
                    if key == "hangs":
                        self._report.hung.add(rank)
            for value, ranks in values.items():
                words = meaning.format(limit=self._room.setup.limit, value=value)
                findings.append(
                    DoctorFinding(
                        check.name,
                        WRONG,
                        f"the check {words} ({places.describe(ranks)})",
                        tuple(ranks),
                        advice,
                    )
                )
        return findings

    def _presence(self) -> list[DoctorFinding]:
        """Name the ranks that never answered, and those that stopped answering."""
        report = self._report
        places, world = report.places, self._room.world_size
        hosts = places.hosts
        here = (
            f"{world - len(report.silent)} of {world} ranks on {len(hosts)}"
            f" host{'s' * (len(hosts) != 1)}"
        )
        if not report.silent:
            return [DoctorFinding("answers", "ok", here)]
        findings = []
        for when in sorted(set(report.silent.values())):
            ranks = tuple(sorted(rank for rank, at in report.silent.items() if at == when))
            since = (
                f"stopped answering in the check of {when}"
                if when
                else f"never answered within {report.setup.limit:g} s"
            )
            advice = (
                "Look at the process there (is it stopped, or waiting for a disk?), or leave this"
                " host out."
            )
            findings.append(
                DoctorFinding("answers", WRONG, f"{places.describe(ranks)} {since}", ranks, advice)
            )
        return findings
