"""Finds ranks that compute more slowly than their peers, which do the same work. Imports no torch.

What counts is the time in a rank's own computation, not what it waits for others: a slow rank makes
all others wait, and all have the same time per step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

WINDOW = 10
"""Steps between two comparisons."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that computes slowly.

    Attributes:
        rank: global rank.
        host: name of its machine.
        factor: its time divided by the median of its peers'.
        peers: the ranks that it was compared with.
    """

    rank: int
    host: str
    factor: float
    peers: tuple[int, ...]


class SlowRanks:
    """Compares the ranks window by window; the same on every rank.

    Args:
        groups: ranks that do the same work, each with all of its peers; a rank without peers is
            compared with nobody.
        factor: how many times as long as its peers a rank must compute to count as slow.
        steps: number of steps that it must be slow for.
        hosts: name of each rank's machine, by rank.
    """

    def __init__(
        self, groups: Sequence[tuple[int, ...]], factor: float, steps: int, hosts: Sequence[str]
    ) -> None:
        self._hosts = hosts
        self._peers = {
            rank: tuple(other for other in group if other != rank)
            for group in groups
            for rank in group
        }
        self._factor = factor
        self._windows = max(1, -(-steps // WINDOW))
        self._slow: dict[int, int] = {}  # windows in a row

    def judge(self, seconds: Mapping[int, float]) -> tuple[SlowRank | None, list[SlowRank]]:
        """Judge a window.

        Args:
            seconds: time in own computation, by rank.

        Returns:
            The slowest rank, None without peers; and the ranks that have been slow for long enough,
            each once until it recovers.
        """
        found = [self._compare(rank, seconds) for rank in sorted(self._peers) if self._peers[rank]]
        report = []
        for one in found:
            self._slow[one.rank] = (
                self._slow.get(one.rank, 0) + 1 if one.factor > self._factor else 0
            )
            if self._slow[one.rank] == self._windows:
                report.append(one)
        return max(found, key=lambda one: one.factor, default=None), report

    def _compare(self, rank: int, seconds: Mapping[int, float]) -> SlowRank:
        peers = self._peers[rank]
        usual = median(seconds[other] for other in peers)
        return SlowRank(rank, self._hosts[rank], seconds[rank] / usual if usual > 0 else 1.0, peers)
