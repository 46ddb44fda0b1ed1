"""Findings of the checks, and words for ranks and hosts. Pure Python."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_3d.errors import listed, spans

OK, UNKNOWN, WARNING, WRONG = "ok", "unknown", "warning", "wrong"
VERDICTS = (WRONG, WARNING, UNKNOWN, OK)
"""Verdicts, the worst first."""


@dataclass(frozen=True)
class DoctorFinding:
    """A result of a check.

    Attributes:
        name: what was looked at, in a few words.
        verdict: one of `VERDICTS`.
        measured: what was measured, with numbers and ranks.
        ranks: the ranks that it concerns; empty if it concerns all.
        advice: what to do; empty if nothing is to be done.
    """

    name: str
    verdict: str
    measured: str
    ranks: tuple[int, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class RankPlace:
    """The process of a rank.

    Attributes:
        rank: global rank.
        host: name of its host; empty if the rank never answered.
        local_rank: number of the rank on its host.
        process: process id on its host.
    """

    rank: int
    host: str
    local_rank: int
    process: int = 0


class RankPlaces:
    """The processes of all ranks.

    Args:
        places: the ranks that answered.
        world_size: number of ranks that were started.
        per_host: number of ranks on each host, to guess the host of a rank that never answered.
    """

    def __init__(self, places: Iterable[RankPlace], world_size: int, per_host: int) -> None:
        self.by_rank = {place.rank: place for place in places}
        self.world_size, self._per_host = world_size, max(1, per_host)

    def host(self, rank: int) -> str:
        """Return the host of a rank; of one that never answered, the host of its neighbors or the
        number of the node."""
        if rank in self.by_rank:
            return self.by_rank[rank].host
        node = rank // self._per_host
        neighbors = [
            place.host for place in self.by_rank.values() if place.rank // self._per_host == node
        ]
        return neighbors[0] if neighbors else f"node {node}"

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The ranks of each host that answered, rising."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.by_rank):
            found.setdefault(self.by_rank[rank].host, []).append(rank)
        return found

    def leaders(self) -> list[int]:
        """Return the lowest rank of each host."""
        return [ranks[0] for ranks in self.hosts.values()]

    def share_host(self, ranks: Iterable[int]) -> bool:
        """Check whether all these ranks are on one host."""
        return len({self.host(rank) for rank in ranks}) == 1

    def describe(self, ranks: Iterable[int]) -> str:
        """Name ranks with their hosts: `rank 3 (node1)`, `ranks 0-3 (node0) and 8 (node1)`; `all
        ranks` without hosts."""
        wanted = sorted(set(ranks))
        if len(wanted) == self.world_size > 1:
            return "all ranks"
        by_host: dict[str, list[int]] = {}
        for rank in wanted:
            by_host.setdefault(self.host(rank), []).append(rank)
        parts = [f"{spans(own)} ({host})" for host, own in by_host.items()]
        shown = parts if len(parts) < 5 else [*parts[:4], f"those of {len(parts) - 4} more hosts"]
        return f"rank{'s' * (len(wanted) > 1)} {listed(shown)}"


def most_common(values: Mapping[int, Any]) -> tuple[Any, dict[Any, list[int]]]:
    """Find the value of most ranks, and the ranks of every other value. Where two are as common,
    that of the lower rank counts.

    Args:
        values: hashable values by rank.
    """
    counts = Counter(values[rank] for rank in sorted(values))
    usual = counts.most_common(1)[0][0]
    others: dict[Any, list[int]] = {}
    for rank in sorted(values):
        if values[rank] != usual:
            others.setdefault(values[rank], []).append(rank)
    return usual, others


def alike(
    name: str,
    values: Mapping[int, Any],
    places: RankPlaces,
    *,
    verdict: str = WRONG,
    advice: str = "",
) -> DoctorFinding:
    """Find whether a value is the same on all ranks; else name the ranks with another one.

    Args:
        name: name of the finding.
        values: values by rank; those that are None are not known.
        places: places of the ranks.
        verdict: verdict if they differ.
        advice: what to do if they differ; `{usual}` stands for the value of most ranks.
    """
    known = {rank: value for rank, value in values.items() if value is not None}
    if not known:
        return DoctorFinding(name, UNKNOWN, "no rank can tell")
    usual, others = most_common(known)
    lacking = [rank for rank in values if values[rank] is None]
    if lacking:
        others = {**others, "none": lacking}
    if not others:
        return DoctorFinding(name, OK, f"{usual}")
    odd = tuple(sorted(rank for ranks in others.values() for rank in ranks))
    differing = listed(f"{value} on {places.describe(ranks)}" for value, ranks in others.items())
    return DoctorFinding(
        name, verdict, f"{usual}, but {differing}", odd, advice.format(usual=usual)
    )


def slow_ones(
    rates: Mapping[Any, float], warning: float, wrong: float
) -> dict[Any, tuple[str, float]]:
    """Return (verdict, share of the median) of the members whose rate is below a share of the
    median of all."""
    if len(rates) < 2:
        return {}
    median = statistics.median(rates.values())
    shares = {key: rate / median if median else 1.0 for key, rate in rates.items()}
    return {
        key: (WRONG if share < wrong else WARNING, share)
        for key, share in shares.items()
        if share < warning
    }


def worst(findings: Sequence[DoctorFinding]) -> str:
    """Return the worst verdict; ok if there is no finding."""
    return min((finding.verdict for finding in findings), key=VERDICTS.index, default=OK)
