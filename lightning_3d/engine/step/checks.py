"""Checks that ranks agree about their batches."""

from __future__ import annotations

import zlib
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.engine.step.totals import DIFFERENT_NAMES
from lightning_3d.errors import ConfigError, DataError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.nested import strided, tensors_of

ALWAYS = 3
"""Batches at the beginning that are all checked."""

EVERY = 64
"""Later, one batch in so many is checked."""


class NowAndThen:
    """The first 3 batches and every 64th, in which the host may wait for the device to check
    something.

    It does not wait in the middle of an optimizer step: a batch there passes its turn to the first
    one of the next step.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._due = False

    def comes(self, *, begins: bool) -> bool:
        """Count a batch. Return whether to check it.

        Args:
            begins: whether no other batch of the same optimizer step came before.
        """
        self.seen += 1
        self._due = self._due or self.seen <= ALWAYS or self.seen % EVERY == 0
        due, self._due = self._due and begins, self._due and not begins
        return due


def check_equal_batches(batches: float, mesh: Mesh, device: torch.device) -> None:
    """Refuse data-parallel ranks with different numbers of batches: those with more would wait for
    the others forever.

    One all-reduce of two numbers over ("cp", "pp", "dp").

    Raises:
        DataError: on all ranks.
    """
    extremes = torch.tensor([batches, -batches], dtype=torch.float64, device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.group("cp", "pp", "dp"))
    most, fewest = extremes[0].item(), -extremes[1].item()
    if most != fewest:
        raise DataError(
            f"Data-parallel ranks have different numbers of batches: {fewest:g} to {most:g}. Let"
            " Lightning inject its DistributedSampler, pass"
            " trainer.strategy.distributed_sampler_kwargs to your sampler, or set"
            f" limit_train_batches, limit_val_batches or limit_predict_batches to {fewest:g}."
        )


def most_micro_batches(own: int, mesh: Mesh) -> int:
    """Find the largest number of micro-batches of any data-parallel rank: one all-reduce of a
    number over ("cp", "dp")."""
    if dist.get_world_size(mesh.data_control) == 1:
        return own
    most = torch.tensor(own)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.data_control)
    return int(most)


def agree_about_logs(checksum: float | None, extras: int, mesh: Mesh) -> tuple[int, int]:
    """Tell all ranks what those with the last stage know: one all-reduce of three numbers over all
    ranks, in host memory.

    Args:
        checksum: of the log keys of this rank (see `StepLog.checksum`); None before the last stage.
        extras: how many numbers the step of this rank has returned beside the loss.

    Returns:
        The checksum, and the largest number of extras.

    Raises:
        ConfigError: on all ranks, if they logged different names.
    """
    extremes = [-inf, -inf] if checksum is None else [checksum, -checksum]
    most = torch.tensor([*extremes, extras], dtype=torch.float64)
    if mesh.layout.world_size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=mesh.world_control)
    highest, lowest, most_extras = most.tolist()
    if highest != -lowest:
        raise ConfigError(DIFFERENT_NAMES)
    return round(highest), round(most_extras)


class SameBatch:
    """Refuses different batches on ranks that must read the same one.

    Tensor-, context- and pipeline-parallel ranks work on one batch together; a data loader that
    shuffles by the global rank would give each rank a different batch, and training would silently
    be wrong. One all-reduce of two numbers over ("tp", "cp", "pp"), `NowAndThen`.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._turn = NowAndThen()

    def check(self, batch: Any, *, begins: bool = True) -> None:
        """Compare the bytes of a batch between ranks, if it is time. Raises DataError on all ranks.

        Args:
            begins: whether no other batch of the same optimizer step came before.
        """
        if (
            not self._turn.comes(begins=begins)
            or self._mesh.size("tp") * self._mesh.size("cp") * self._mesh.size("pp") == 1
        ):
            return
        checksum = 0
        for tensor in strided(tensors_of(batch)):
            if tensor.numel():
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                checksum = zlib.crc32(data.numpy().tobytes(), checksum)
        extremes = torch.tensor([checksum, -checksum], dtype=torch.int64, device=self._device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._mesh.group("tp", "cp", "pp"))
        highest, lowest = extremes[0].item(), -extremes[1].item()
        if highest != lowest:
            raise DataError(
                "Ranks of one model replica (same data-parallel index, other tp, cp or pp index)"
                " read different batches. Let Lightning inject its DistributedSampler"
                " (use_distributed_sampler=True), or pass"
                " trainer.strategy.distributed_sampler_kwargs to your sampler. Seed the order"
                " equally on all ranks (seed_everything). A data set must return the same sample"
                " for the same index in every process: no random draw in __getitem__ without a seed"
                " from the index, and no order of a set of strings."
            )
