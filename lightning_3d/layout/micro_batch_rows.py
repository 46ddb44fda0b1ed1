"""Which rows of the order of one process each data-parallel rank reads, and in which micro-batch.
Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatchRows:
    """How the rows of one order are dealt to data-parallel ranks.

    Usually rank r of `dp` reads rows r, r + dp, r + 2 dp, ... In an elastic run with fewer ranks
    than its whole layout has, each rank reads complete micro-batches of the whole layout in turn.
    So a micro-batch has the same rows, and the same random numbers, on any number of ranks, and
    what depends on which rows share a micro-batch (dropout, the auxiliary loss of a router) stays
    the same too.

    Attributes:
        dp: data-parallel ranks that are there.
        whole_dp: data-parallel ranks of the whole layout.
        micro_batch_size: rows of a micro-batch; any number if `whole_dp` is `dp`.
    """

    dp: int
    whole_dp: int
    micro_batch_size: int = 1

    @property
    def together(self) -> int:
        """Consecutive rows of the order that are dealt without regard to the others."""
        return (
            self.dp
            if self.whole_dp == self.dp
            else math.lcm(self.whole_dp, self.dp) * self.micro_batch_size
        )

    def of_rank(self, rank: int, order: Sequence[T], skip: int = 0) -> Iterator[T]:
        """Return the rows that one rank reads, in the order in which it reads them.

        Args:
            rank: its data-parallel index.
            order: rows in the order of one process, a multiple of `dp`. If they are not whole
                micro-batches of all ranks, the last ones are dealt one by one. A `range` takes no
                memory, and the time to skip its rows does not depend on their number.
            skip: number of rows of this rank to leave out, the first ones.
        """
        size = self.micro_batch_size
        if self.whole_dp == self.dp:
            yield from order[rank :: self.dp][skip:]
            return
        dealt = len(order) // self.together * self.together
        numbers = range(rank, dealt // size, self.dp)
        left_out = min(skip // size, len(numbers))
        micro_batches = (self._micro_batch(number, order) for number in numbers[left_out:])
        yield from islice(
            chain(chain.from_iterable(micro_batches), order[dealt + rank :: self.dp]),
            skip - left_out * size,
            None,
        )

    def _micro_batch(self, number: int, order: Sequence[T]) -> Sequence[T]:
        """Return the rows of a micro-batch of the whole layout."""
        first = (
            number // self.whole_dp * self.whole_dp * self.micro_batch_size + number % self.whole_dp
        )
        return order[first : first + self.whole_dp * self.micro_batch_size : self.whole_dp]

    def number(self, rank: int, index: int, micro_batches: int) -> int:
        """Return the number that a micro-batch has in the whole layout, among those of all ranks.

        Args:
            rank: data-parallel index of the rank that computes it.
            index: its index on that rank.
            micro_batches: on each rank that is there.
        """
        round_, place = divmod(index * self.dp + rank, self.whole_dp)
        return place * self._rounds(micro_batches) + round_

    def total(self, micro_batches: int) -> int:
        """Return a bound above all that `number` returns for this number of micro-batches on each
        rank."""
        return self.whole_dp * self._rounds(micro_batches)

    def _rounds(self, micro_batches: int) -> int:
        return -(-micro_batches * self.dp // self.whole_dp)
