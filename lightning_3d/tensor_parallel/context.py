"""What a sharded layer knows about its tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from lightning_3d.randomness import RandomState


@dataclass
class TensorParallel:
    """The ranks that share the layers of one stage.

    Attributes:
        group: their process group.
        size: number of them.
        rank: this rank's coordinate, 0 .. size - 1; the order of the group.
        random: dropout streams, None without dropout.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    random: RandomState | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """A copied model (weight averaging) talks to the same ranks."""
        return self
