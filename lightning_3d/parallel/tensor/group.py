"""The tensor-parallel group, as a sharded layer needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from lightning_3d.parallel.sequence_shards import SequenceShards

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_3d.parallel.random_streams import RandomState


class GatheredInput(Protocol):
    """The input of a region that was gathered from the parts of the sequence, see
    `sequence.Gathered`."""

    whole: Tensor

    def multiply(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` of the whole input, which keeps only this rank's part for the backward."""


@dataclass
class TensorParallel:
    """The ranks that share the layers of one stage.

    Attributes:
        group: their process group.
        size: number of them.
        rank: this rank's coordinate, 0 .. size - 1; the order of the group.
        random: dropout streams, None without dropout.
        sequence: split of the hidden states between layers in this forward.
        gathered: the input of the region that is running, where it was gathered from parts of the
            sequence.
        gathers_again: whether a compiled block keeps its part of such inputs and gathers them again
            in the backward; false where the backward runs whole blocks again, which gathers them,
            too.
    """

    group: dist.ProcessGroup
    size: int
    rank: int
    random: RandomState | None = None
    sequence: SequenceShards = field(default_factory=SequenceShards)
    gathered: GatheredInput | None = None
    gathers_again: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        """A copied model (weight averaging) talks to the same ranks."""
        return self
