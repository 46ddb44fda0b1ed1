"""Which row of a blend comes from which source: a fixed cycle whose shares are exact over any
number of rows. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush

import numpy as np

from lightning_3d.app.config.blend_sources import whole_shares


@dataclass(frozen=True, eq=False)
class Interleaving:
    """A cycle of rows that repeats forever. After any number of rows k, a source with the share w
    has had more than w k - 1 and fewer than w k + 1 of them.

    Attributes:
        shares: rows of each source in a cycle.
        source: (cycle,); the source of each row of a cycle.
        earlier: (cycle,); rows of the same source before it in the cycle.
    """

    shares: tuple[int, ...]
    source: np.ndarray
    earlier: np.ndarray

    @classmethod
    def of(cls, weights: Sequence[Fraction]) -> Interleaving:
        """Make the cycle of weights, which must be at least 0 and not all 0. Only their ratios
        count."""
        shares = whole_shares(weights)
        order = _earliest_deadline_first(shares)
        earlier = np.empty(len(order), np.int32)
        for number in range(len(shares)):
            mine = order == number
            earlier[mine] = np.arange(mine.sum())
        return cls(shares, order, earlier)

    @property
    def cycle(self) -> int:
        """Number of rows of a cycle."""
        return len(self.source)

    def at(self, row: int) -> tuple[int, int]:
        """Return (source of a row of the blend, number of rows of that source before it)."""
        cycles, place = divmod(row, self.cycle)
        number = int(self.source[place])
        return number, cycles * self.shares[number] + int(self.earlier[place])

    def rows_before(self, number: int, row: int) -> int:
        """Return how many rows of the blend come before this row of a source, whose share must not
        be 0."""
        cycles, place = divmod(row, self.shares[number])
        return cycles * self.cycle + int(np.flatnonzero(self.source == number)[place])


def _earliest_deadline_first(shares: Sequence[int]) -> np.ndarray:
    """Order the rows of a cycle so that no source is a row ahead or behind.

    With the share w, row j of a source may come from place floor(j / w) on and must come before
    place ceil((j + 1) / w). Taking the row with the earliest end meets all of these bounds (Baruah,
    Cohen, Plaxton and Varvel, "Proportionate progress", 1996).
    """
    cycle = sum(shares)
    order = np.empty(cycle, np.uint16)
    ready = [(-(-cycle // share), number, 0) for number, share in enumerate(shares) if share]
    heapify(ready)
    waiting: list[tuple[int, int, int]] = []
    for place in range(cycle):
        while waiting and waiting[0][0] <= place:
            _, number, row = heappop(waiting)
            heappush(ready, (-(-(row + 1) * cycle // shares[number]), number, row))
        _, number, row = heappop(ready)
        order[place] = number
        row += 1
        heappush(waiting, (row * cycle // shares[number], number, row))
    return order
