"""What a sharded layer knows about its tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_3d.sequence import SequenceShards

if TYPE_CHECKING:
    from lightning_3d.randomness import RandomState
    from lightning_3d.tensor_parallel.sequence import Gathered


@dataclass
class TensorParallel:
    """The ranks that share the layers of one stage.

    Attributes:
        group: their process group.
        size: number of them.
        rank: this rank's coordinate, 0 .. size - 1; the order of the group.
        random: dropout streams, None without dropout.
        sequence: how hidden states between layers are dealt out in this forward.
        gathered: the input of the region that is running, where it was gathered from parts of the sequence.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    random: RandomState | None = None
    sequence: SequenceShards = field(default_factory=SequenceShards)
    gathered: Gathered | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """A copied model (weight averaging) talks to the same ranks."""
        return self
