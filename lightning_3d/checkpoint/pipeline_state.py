"""Hyper parameters and schedulers that differ between pipeline ranks, as with learning rates that depend on the layer.

Rank 0 writes Lightning's state. What another stage has of its own would be lost without a word, so it is collected here where it
differs, and given back to the same stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from lightning_3d.errors import CheckpointError
from lightning_3d.mesh import Mesh

_KEY = "lightning_3d_pipeline_ranks"
_OWN = ("optimizer_states", "lr_schedulers")


def share_pipeline_state(checkpoint: dict[str, Any], mesh: Mesh, schedule: str) -> dict[str, Any]:
    """The checkpoint, with each pipeline rank's optimizer description and schedulers where they differ. Collective."""
    if mesh.size("pp") == 1:
        return checkpoint
    gathered: list[Any] = [None] * mesh.size("pp")
    own = {key: checkpoint[key] for key in _OWN if key in checkpoint}
    dist.all_gather_object(gathered, own, group=mesh.control)
    if all(repr(state) == repr(gathered[0]) for state in gathered):
        return checkpoint
    return checkpoint | {_KEY: {"stages": _stages(mesh, schedule), "states": gathered}}


def take_pipeline_state(checkpoint: Mapping[str, Any], mesh: Mesh, schedule: str) -> dict[str, Any]:
    """The checkpoint with this pipeline rank's own optimizer description and schedulers.

    Raises:
        CheckpointError: they differ between stages, and the model is cut into other stages now.
    """
    own = dict(checkpoint)
    found = own.pop(_KEY, None)
    if found is None:
        return own
    if found["stages"] != _stages(mesh, schedule):
        raise CheckpointError(
            f"The optimizer's parameter groups in this checkpoint differ between pipeline stages ({found['stages']}), and this run"
            f" has others ({_stages(mesh, schedule)}). Resume with the same pp, vp and schedule, or load the weights only."
        )
    return own | found["states"][mesh.index("pp")]


def _stages(mesh: Mesh, schedule: str) -> str:
    return f"pp{mesh.size('pp')}_vp{mesh.layout.vp}, {schedule}"
