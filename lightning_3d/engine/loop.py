"""What an engine asks whoever drives it: Lightning's Trainer, through the strategy, or a loop of
the user's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class BatchOrigin:
    """Where a batch comes from.

    Attributes:
        loader: its data loader; None where it is unknown.
        index: its place in the loader.
        to_come: number of batches of this rank, at the first one of an epoch or an evaluation;
            infinity if unknown, None at later ones.
    """

    loader: object = None
    index: int = 0
    to_come: float | None = None


class Loop(Protocol):
    """The loop around an engine.

    Attributes:
        steps: number of optimizer steps before the one that runs.
        accumulates: number of batches of an optimizer step; None where its end shows it.
        learning_rate: of the first parameter group.
    """

    @property
    def steps(self) -> int: ...
    @property
    def accumulates(self) -> int | None: ...
    @property
    def learning_rate(self) -> float: ...
    def origin(self, hook: str) -> BatchOrigin:
        """Return where the batch that runs comes from. `hook` is "training", "validation", "test"
        or "predict"."""
        ...

    def quietly(self) -> AbstractContextManager[None]:
        """Return a context in which nothing reaches loggers."""
        ...
