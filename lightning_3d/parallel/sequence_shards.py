"""Sequence parallelism: how the hidden states between layers are split over the tensor-parallel
ranks. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class SequenceShards:
    """Split of the sequence, shared by the pipeline stages, the layers and the dropout streams of
    one rank.

    Attributes:
        ranks: of the tensor-parallel group.
        length: tokens of the whole sequence in this forward; 0 while hidden states between layers
            are whole.
    """

    ranks: int = 1
    length: int = 0

    @property
    def active(self) -> bool:
        return self.length > 0

    @property
    def part(self) -> int:
        """Tokens on each rank; if ranks do not divide the sequence, the last ones hold some
        padding."""
        return -(-self.length // self.ranks)

    def real(self, rank: int) -> int:
        """Number of tokens on a rank that are not padding."""
        return min(self.part, max(self.length - rank * self.part, 0))

    def moment(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context with the length of now: a block that is recomputed
        may belong to an earlier call of the model, with sequences of another length."""
        length = self.length

        @contextmanager
        def again() -> Iterator[None]:
            before, self.length = self.length, length
            try:
                yield
            finally:
                self.length = before

        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceShards:
        """A copied model (weight averaging) runs in the same forwards."""
        return self
