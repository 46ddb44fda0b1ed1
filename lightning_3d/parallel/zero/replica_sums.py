"""Sums of gradients over the replicas of a shard, where ZeRO shards over groups of neighbouring
data-parallel ranks (HSDP)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel.zero.flat_partition import OwnedPiece, Partition


class ReplicaSums:
    """One all-reduce of this rank's part of each partition over the ranks that have the same part,
    after the last backward.

    Parameters that are left out have been summed over all data-parallel ranks. Where they lie
    between others, the part is sent in several messages.

    Args:
        group: one rank of each shard group.
        pieces: what this rank steps of the parameters whose gradients are summed here.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: Sequence[OwnedPiece]) -> None:
        self._group, self._runs = group, _runs(pieces)

    def add_up(self) -> None:
        """Replace the gradients by their sums over the group."""
        works = [exchange.start_all_reduce(_gradient(*run), self._group) for run in self._runs]
        for work in works:
            work.wait()


def _gradient(partition: Partition, start: int, stop: int) -> Tensor:
    assert partition.gradient is not None
    return partition.gradient[start:stop]


def _runs(pieces: Sequence[OwnedPiece]) -> list[tuple[Partition, int, int]]:
    """(partition, start, stop) of neighbouring pieces."""
    runs: list[tuple[Partition, int, int]] = []
    for piece in pieces:
        partition, slot = piece.partition, piece.slot
        if runs and runs[-1][0] is partition and runs[-1][2] == slot.start:
            runs[-1] = (partition, runs[-1][1], slot.stop)
        else:
            runs.append((partition, slot.start, slot.stop))
    return runs
