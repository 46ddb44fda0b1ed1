"""Data loaders that know their position, and loaders that may end anywhere: what data-parallel
ranks agree about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_3d.checkpoint.json_state import Packer
from lightning_3d.compat.lightning_fetchers import Position, Reached, StatesOfAll
from lightning_3d.errors import DataError, plural, spans
from lightning_3d.parallel.mesh import Mesh, gathered

LOADERS = "lightning_3d_loaders"
"""Key in a checkpoint: the positions of the training loaders of every data-parallel index; one
where all are equal."""

RESHARD = "load_state_dicts"
"""Name of the method of a loader that can resume on another number of data-parallel ranks: it gets
the states of all ranks then."""


def end_together(mesh: Mesh, *, predicts: bool) -> Callable[[RunningStage, Reached], bool | None]:
    """Make the function that ends streams on all ranks after the same batch.

    Args:
        predicts: whether ranks must also predict equally many batches, because a forward
            communicates between them.
    """

    def agree(stage: RunningStage, reached: Reached) -> bool | None:
        if stage == RunningStage.PREDICTING and not predicts:
            return None
        mine = torch.tensor([reached.has_batch, reached.ends, reached.loader])
        most = torch.cat([mine, -mine])
        # in host memory: the host does not wait for the device
        dist.all_reduce(most, dist.ReduceOp.MAX, mesh.world_control)
        if torch.equal(most[:3], -most[3:]):
            return None
        return _end(stage, reached, mesh)

    return agree


def _end(stage: RunningStage, reached: Reached, mesh: Mesh) -> bool:
    """End an epoch of training whose streams differ; see `compat.lightning_fetchers.Agree`.

    Raises:
        DataError: on all ranks, where an end would hide something: results of an evaluation would
            be those of a part of the data.
    """
    places: list[tuple[int, Reached]] = gathered((mesh.index("dp"), reached), mesh)
    prefix = stage.dataloader_prefix
    kind = {"val": "validation", "train": "training", "predict": "prediction"}.get(
        prefix or "", prefix
    )
    all_have_one = all(place.has_batch for _, place in places)
    batches = reached.before + int(all_have_one)
    ended = {index for index, place in places if place.ends or not place.has_batch}
    going_on = {index for index, place in places if place.has_batch and not place.ends}
    count = f"{batches} {kind} batch{'es' * (batches != 1)}"
    works = (
        "Let the loader have as many batches on every rank, or set"
        f" limit_{prefix}_batches={max(batches, 1)}"
    )
    if not ended:
        raise DataError(
            f"After {count}, data-parallel ranks read different loaders, because one ended earlier"
            " on some of them. Let each loader have as many batches on every rank, or set"
            f" limit_{prefix}_batches."
        )
    if both := ended & going_on:
        raise DataError(
            f"Of the ranks of one model replica (data-parallel index {spans(both)}), some have"
            f" {count} and others more. Select the samples of a rank by"
            " trainer.strategy.distributed_sampler_kwargs, not by its global rank."
        )
    said = (
        f"Data-parallel {'ranks' if len(ended) > 1 else 'rank'} {spans(ended)} had {count}, and"
        " other ranks have more."
    )
    if stage != RunningStage.TRAINING or batches == 0:
        raise DataError(f"{said} All must run equally many. {works}.")
    rank_zero_warn(
        f"{said} This epoch ends for all, and what the others have left of it is not trained on."
        f" {works}."
    )
    return all_have_one


def share_positions(position: Position, mesh: Mesh) -> dict[str, Any]:
    """Gather the positions of all data-parallel ranks, for a checkpoint. Collective over ("dp",
    "cp")."""
    dp = mesh.size("dp")
    positions = [position]
    if dp > 1:
        found: list[Any] = [None] * dp * mesh.size("cp")
        dist.all_gather_object(found, (mesh.index("dp"), position), group=mesh.data_control)
        by_index = dict(found)
        positions = [by_index[index] for index in range(dp)]
    if all(_plain(other) == _plain(positions[0]) for other in positions[1:]):
        positions = positions[:1]
    return {"dp": dp, "positions": positions}


def own_position(saved: dict[str, Any], loaders: list[Any], mesh: Mesh) -> Position:
    """Find the position that the loaders of this rank resume.

    Raises:
        DataError: the checkpoint is of another number of data-parallel ranks, which read different
            data, and a loader cannot take over theirs.
    """
    positions = saved["positions"]
    dp = mesh.size("dp")
    index = mesh.index("dp")
    if saved["dp"] == dp:
        return positions[index % len(positions)]
    position = dict(positions[0])
    position["states"] = list(position["states"])
    for place, loader in enumerate(loaders[: len(position["states"])]):
        states = [other["states"][place] for other in positions]
        if callable(getattr(loader, RESHARD, None)):
            position["states"][place] = StatesOfAll(states * (saved["dp"] // len(states)))
            continue
        what = f"training data loader {place}, a {type(loader).__name__},"
        if any(_plain(state) != _plain(states[0]) for state in states):
            raise DataError(
                f"The checkpoint has states of {what} that differ between its"
                f" {plural(saved['dp'], 'data-parallel rank')}, but the layout now has dp={dp}, so"
                f" no rank's samples are known. Use dp={saved['dp']}, or give the loader a method"
                f" {RESHARD}(states), which gets the states of all {saved['dp']} ranks."
            )
        if states[0] is not None and not hasattr(loader, "batch_sampler"):
            rank_zero_warn(
                f"The state of {what} was saved with dp={saved['dp']} and is loaded with dp={dp}."
                " If it counts the samples of one rank, they are wrong now: give the loader a"
                f" method {RESHARD}(states), which gets the states of all {saved['dp']} ranks."
            )
    return position


def _plain(state: Any) -> tuple[Any, list[Any]]:
    """Return a state as a checkpoint has it, to compare it with another one."""
    packer = Packer()
    packed = packer.pack_entries({"state": state})
    return packed, [tensor.tolist() for tensor in packer.tensors.values()]
