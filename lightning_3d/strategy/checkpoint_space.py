"""Compare the size of a fit's checkpoints with the free disk space before the first step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.rank_agreement import on_rank_zero
from lightning_3d.checkpoint.state import MASTER, OptimizerOwner
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.sharding import ShardSpec
from lightning_3d.parallel.zero.stepper import inner_states, state_without_values
from lightning_3d.storage.numbers import show_bytes
from lightning_3d.storage.remote_path import place

if TYPE_CHECKING:
    import lightning.pytorch as pl

_STATES = 2
"""Assumed number of states per parameter for an optimizer that cannot be measured: Adam's."""


@dataclass(frozen=True)
class Demand:
    """Space that the callbacks of a fit need on one file system at the same time.

    Attributes:
        folder: one of the folders that they write to.
        new: most checkpoints in addition to the existing ones, including the one being written.
        there: existing checkpoints of these callbacks.
        size: bytes of a checkpoint.
        free: free bytes.
    """

    folder: Path
    new: int
    there: int
    size: int
    free: int

    def check(self) -> None:
        """Raise ConfigError if the checkpoints cannot fit."""
        if self.new * self.size <= self.free:
            return
        most = self.new + self.there
        count = (
            "one is kept"
            if most == 1
            else f"up to {most} exist at once, including the one being written"
        )
        there = (
            f" ({self.there} {'exists' if self.there == 1 else 'exist'} already)"
            if self.there
            else ""
        )
        needed = "The others need" if self.there else "They need"
        fits = self.free // self.size + self.there - 1  # one more is there while it is written
        fewer = (
            f", keep fewer (trainer.keep_last={fits}, or save_top_k={fits} of the callback)"
            if 0 < fits < most - 1
            else ""
        )
        raise ConfigError(
            f"The checkpoints of this run do not fit in {self.folder}: each takes"
            f" {show_bytes(self.size)}, and {count}{there}. {needed}"
            f" {show_bytes(self.new * self.size)}, but only {show_bytes(self.free)} is free. Save"
            f" to another folder (hydra.run.dir or dirpath){fewer}, or start anyway with force=true"
            " (checkpoint_check_space=False)."
        )


def require_space(
    trainer: pl.Trainer,
    module: nn.Module,
    specs: Mapping[str, ShardSpec],
    mesh: Mesh,
    owner: OptimizerOwner | None,
) -> None:
    """Refuse a fit whose checkpoints cannot fit on the local disks that its callbacks write to.
    Collective.

    Only tensors are counted, so no fit is refused that could work. URLs are not checked, nor file
    systems that do not report their size.

    Raises:
        ConfigError: on all ranks, with the numbers.
    """
    savers = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath
    ]
    steps = trainer.max_steps - trainer.global_step if trainer.max_steps > 0 else None
    if not savers or steps == 0 or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    weights, everything = checkpoint_bytes(module, specs, mesh, trainer.optimizers, owner)
    _check_on_rank_zero(lambda: demands(savers, steps, weights, everything))


def _check_on_rank_zero(found: Callable[[], list[Demand]]) -> None:
    """Check demands on rank 0, which sees the disk that it writes to, and raise the ConfigError on
    all ranks. Collective."""

    def attempt() -> str | None:
        try:
            for demand in found():
                demand.check()
        except ConfigError as error:
            return str(error)
        return None

    refusal = on_rank_zero(attempt)
    if refusal is not None:
        raise ConfigError(refusal)


def demands(
    savers: Sequence[ModelCheckpoint], steps: int | None, weights: int, everything: int
) -> list[Demand]:
    """Compute the demand on each file system that callbacks write to. Local.

    Args:
        steps: number of remaining optimizer steps; None if unknown.
        weights, everything: bytes of a checkpoint without and with the optimizer's state.
    """
    by_device: dict[int, Demand] = {}
    for saver in savers:
        folder = place(str(saver.dirpath))
        if not isinstance(folder, Path):
            continue
        above = next(parent for parent in (folder, *folder.parents) if parent.exists())
        space, device = os.statvfs(above), above.stat().st_dev
        if not space.f_blocks:
            continue
        there = sum(Path(path).is_dir() for path in saver.best_k_models)
        size = weights if saver.save_weights_only else everything
        own = Demand(
            folder, most_new(saver, steps, there), there, size, space.f_bavail * space.f_frsize
        )
        other = by_device.get(device)
        # of different sizes the smaller one counts, so that nothing is refused that would fit
        if other is not None:
            own = replace(
                other,
                new=other.new + own.new,
                there=other.there + own.there,
                size=min(other.size, own.size),
            )
        by_device[device] = own
    return list(by_device.values())


def most_new(saver: ModelCheckpoint, steps: int | None, there: int) -> int:
    """Compute how many checkpoints a callback has at most, in addition to its existing ones.

    Args:
        steps: optimizer steps to come.
        there: number of its existing checkpoints.
    """
    every = saver._every_n_train_steps
    to_come = max(1, -(-steps // every)) if every and steps is not None else None
    if saver.save_top_k == 0:
        return int(bool(saver.save_last))
    # all are kept; where their number is not known, nothing can be said of more than the first
    if saver.save_top_k < 0:
        most = to_come or 1
    else:
        room = max(1, saver.save_top_k + 1 - there)
        most = room if to_come is None else min(room, to_come)
    return most + int(saver.save_last is True) + _kept_for_good(saver, steps)


def _kept_for_good(saver: ModelCheckpoint, steps: int | None) -> int:
    """Compute how many further checkpoints a `PeriodicCheckpoint` keeps of those that are no longer
    among the newest."""
    every = getattr(saver, "keep_every_n_steps", None)
    if every is None or steps is None or saver.save_top_k < 1:
        return 0
    return max(0, steps // every - saver.save_top_k)


def checkpoint_bytes(
    module: nn.Module,
    specs: Mapping[str, ShardSpec],
    mesh: Mesh,
    optimizers: Sequence[Optimizer],
    owner: OptimizerOwner | None,
) -> tuple[int, int]:
    """Bytes of the whole model's tensors, each counted once: weights with their average, and these
    with what the optimizer will keep. Collective over the pipeline ranks.
    """
    held = owner.optimizer_shards() if owner is not None else []
    averages = owner is not None and owner.keeps_average
    has_masters = any(MASTER in shard.values for shard in held)
    own: dict[str, tuple[int, int]] = {}
    for name, parameter in module.named_parameters():
        spec = specs[name]
        count, width = prod(spec.global_shape), parameter.element_size()
        masters = has_masters and width < 4
        state = average = 0
        if parameter.requires_grad and optimizers:
            dtype = torch.float32 if masters else parameter.dtype
            state = state_bytes(optimizers[0], torch.Size(spec.global_shape), dtype) + (
                4 * count if masters else 0
            )
            average = max(4, width) if averages else 0
        own[spec.tied_to or name] = (count * (width + average), count * (width + average) + state)
    gathered: list[Any] = [None] * mesh.size("pp")
    dist.all_gather_object(gathered, own, group=mesh.control)
    whole = {name: sizes for part in gathered for name, sizes in part.items()}
    return sum(weights for weights, _ in whole.values()), sum(
        everything for _, everything in whole.values()
    )


def state_bytes(optimizer: Optimizer, shape: torch.Size, dtype: torch.dtype) -> int:
    """Find the bytes that an optimizer keeps for a parameter, without step counts, by a step of a
    similar optimizer on a tensor without values."""
    try:
        states = state_without_values(optimizer, optimizer.param_groups[0], shape, dtype)
    except Exception:  # one that takes other arguments, or steps in C++: Adam, most likely
        return _STATES * max(4, dtype.itemsize) * prod(shape)
    return sum(
        state.nbytes
        for state in inner_states(states).values()
        if isinstance(state, Tensor) and state.ndim
    )
