"""Checks that ranks agree about their batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.errors import DataError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import tensors_of

ALWAYS = 3
"""Steps at the beginning that are all checked."""

EVERY = 64
"""Later, one step in so many is checked."""


def check_equal_batches(batches: float, mesh: Mesh, device: torch.device) -> None:
    """Refuse data-parallel ranks with different numbers of batches: those with more would wait for the others forever.

    One all-reduce of two numbers over ("cp", "pp", "dp").

    Raises:
        DataError: on all ranks.
    """
    extremes = torch.tensor([batches, -batches], dtype=torch.float64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.group("cp", "pp", "dp"))
    most, fewest = extremes[0].item(), -extremes[1].item()
    if most != fewest:
        raise DataError(
            f"Data-parallel ranks have different numbers of batches: {fewest:g} to {most:g}. Let Lightning inject its"
            " DistributedSampler, pass trainer.strategy.distributed_sampler_kwargs to your sampler, or set limit_train_batches,"
            f" limit_val_batches or limit_predict_batches to {fewest:g}."
        )


def most_micro_batches(own: int, mesh: Mesh) -> int:
    """Find the largest number of micro-batches of any data-parallel rank: one all-reduce of a number over ("cp", "dp")."""
    most = torch.tensor(own)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.data_control)
    return int(most)


class SameBatch:
    """Refuses different batches on ranks that must read the same one.

    Tensor-, context- and pipeline-parallel ranks work on one batch together; a data loader that shuffles by the global rank would give each
    rank a different batch, and training would silently be wrong. One all-reduce of two numbers over ("tp", "cp", "pp") in the first 3 steps
    and in every 64th.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._seen = 0

    def check(self, batch: Any) -> None:
        """Compare the bytes of a batch between ranks, in a step that is checked. Raises DataError on all ranks."""
        self._seen += 1
        if self._mesh.size("tp") * self._mesh.size("cp") * self._mesh.size("pp") == 1 or (self._seen > ALWAYS and self._seen % EVERY):
            return
        checksum = 0
        for tensor in tensors_of(batch):
            if tensor.numel():
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                checksum = zlib.crc32(data.numpy().tobytes(), checksum)
        extremes = torch.tensor([checksum, -checksum], dtype=torch.int64, device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._mesh.group("tp", "cp", "pp"))
        highest, lowest = extremes[0].item(), -extremes[1].item()
        if highest != lowest:
            raise DataError(
                "Ranks of one model replica (same data-parallel index, other tp, cp or pp index) read different batches. Let Lightning"
                " inject its DistributedSampler (use_distributed_sampler=True), or pass trainer.strategy.distributed_sampler_kwargs to your"
                " sampler. Seed the order equally on all ranks (seed_everything). A data set must return the same sample for the same index"
                " in every process: no random draw in __getitem__ without a seed from the index, and no order of a set of strings."
            )
