"""Data loaders that know their position, and loaders that may end anywhere: what data-parallel ranks agree about them."""

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
"""Key in a checkpoint: the positions of the training loaders of every data-parallel index; one where all are equal."""

RESHARD = "load_state_dicts"
"""Name of the method of a loader that can resume on another number of data-parallel ranks: it gets the states of all ranks then."""


def end_together(mesh: Mesh, *, predicts: bool) -> Callable[[RunningStage, Reached], bool | None]:
    """Make the function that ends streams on all ranks after the same batch.

    Args:
        predicts: whether ranks must also predict equally many batches, because a forward communicates between them.
    """

    def agree(stage: RunningStage, reached: Reached) -> bool | None:
        if stage == RunningStage.PREDICTING and not predicts:
            return None
        mine = torch.tensor([reached.has_batch, reached.ends, reached.loader])
        most = torch.cat([mine, -mine])
        dist.all_reduce(most, dist.ReduceOp.MAX, mesh.world_control)  # in host memory: the host does not wait for the device
        if torch.equal(most[:3], -most[3:]):
            return None
        return _end(stage, reached, mesh)

    return agree


def _end(stage: RunningStage, reached: Reached, mesh: Mesh) -> bool:
    """End an epoch of training whose streams differ; see `compat.lightning_fetchers.Agree`.

    Raises:
        DataError: on all ranks, where an end would hide something: results of an evaluation would be those of a part of the data.
    """
    places: list[tuple[int, Reached]] = gathered((mesh.index("dp"), reached), mesh)
    kind = {"val": "validation", "train": "training"}.get(stage.dataloader_prefix or "", stage.dataloader_prefix)
    before = reached.before
    had_batches = all(place.has_batch for _, place in places)
    batches = before + int(had_batches)
    short = sorted({index for index, place in places if place.ends or not place.has_batch})
    longer = {index for index, place in places if place.has_batch and not place.ends}
    if longer & set(short):
        raise DataError(
            f"Ranks of one model replica (data-parallel index {spans(sorted(longer & set(short)))}; other tp, cp or pp index) have different"
            f" numbers of {kind} batches: some end after {batches}. Select the samples of a rank by"
            " trainer.strategy.distributed_sampler_kwargs, not by the global rank."
        )
    ended = f"The {kind} data of data-parallel {'ranks' if len(short) > 1 else 'rank'} {spans(short)} "
    if not short:
        raise DataError(
            f"Data-parallel ranks read different {kind} data loaders after {before} batch{'es' * (before != 1)}, because a loader ended"
            f" earlier on some of them. Let each loader have as many batches on every rank, or set limit_{stage.dataloader_prefix}_batches."
        )
    ended += f"{'end' if len(short) > 1 else 'ends'} after {batches} batch{'es' * (batches != 1)}, and that of other ranks goes on."
    works = f"limit_{stage.dataloader_prefix}_batches={max(batches, 1)}"
    if stage != RunningStage.TRAINING or batches == 0:
        raise DataError(
            f"{ended} All data-parallel ranks must run equally many. Let the loader have as many batches on every rank, or set {works}."
        )
    rank_zero_warn(
        f"{ended} This epoch ends for all ranks, and what the others have left of it is not trained on. Let the loader have as many batches"
        f" on every rank, or set {works}, to choose where an epoch ends."
    )
    return had_batches


def share_positions(position: Position, mesh: Mesh) -> dict[str, Any]:
    """Gather the positions of all data-parallel ranks, for a checkpoint. Collective over ("dp", "cp")."""
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
        DataError: the checkpoint is of another number of data-parallel ranks, which read different data, and a loader cannot take over
            theirs.
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
                f"The checkpoint has states of {what} that differ between its {plural(saved['dp'], 'data-parallel rank')}, but the layout"
                f" now has dp={dp}, so no rank's samples are known. Use dp={saved['dp']}, or give the loader a method"
                f" {RESHARD}(states), which gets the states of all {saved['dp']} ranks."
            )
        if states[0] is not None and not hasattr(loader, "batch_sampler"):
            rank_zero_warn(
                f"The state of {what} was saved with dp={saved['dp']} and is loaded with dp={dp}. If it counts the samples of one rank,"
                f" they are wrong now: give the loader a method {RESHARD}(states), which gets the states of all {saved['dp']} ranks."
            )
    return position


def _plain(state: Any) -> tuple[Any, list[Any]]:
    """Return a state as a checkpoint has it, to compare it with another one."""
    packer = Packer()
    packed = packer.pack_entries({"state": state})
    return packed, [tensor.tolist() for tensor in packer.tensors.values()]
