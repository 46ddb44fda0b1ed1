"""The context-parallel group, as the attention of a model needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share the tokens of a sequence.

    Attributes:
        group: their process group.
        size: number of them.
        rank: this rank's coordinate, 0 .. size - 1; the order of the group.
        kind: how they attend to each other's tokens, "ring" or "ulysses".
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    kind: str = "ring"

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """A copied model (weight averaging) talks to the same ranks."""
        return self
