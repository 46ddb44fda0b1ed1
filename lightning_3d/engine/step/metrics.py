"""torchmetrics objects in a pipelined step: updated on the last stage only, computed from the
states of all its data ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_3d.compat.batches import move_data_to_device
from lightning_3d.compat.torchmetrics import metric_state, restore_metric_state, sync_metric_with
from lightning_3d.parallel.mesh import Mesh


def share_metrics(
    module: nn.Module, mesh: Mesh, last_rank: int, refuse: Callable[[str], None]
) -> None:
    """Make every torchmetrics object of `module` compute its value from the states of the last
    stages only.

    The other stages never update theirs, and tensor- and context-parallel ranks hold copies.
    Communicates when a metric is computed (usually once an epoch): one gather over all ranks with
    this rank's tensor-parallel index.

    Args:
        last_rank: pipeline rank that runs the last stage.
        refuse: called before a gather; raises where a step is running.
    """
    group = mesh.group("cp", "pp", "dp")
    coordinates = [mesh.layout.coordinates(rank) for rank in mesh.ranks("cp", "pp", "dp")]
    sources = [
        place for place, of in enumerate(coordinates) if (of["pp"], of["cp"]) == (last_rank, 0)
    ]

    def gather(metric: Metric) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
        def states(own: dict[str, Any]) -> list[dict[str, Any]]:
            refuse("metric.compute(), or dist_sync_on_step=True")
            gathered: list[Any] = [None] * len(coordinates)
            dist.all_gather_object(gathered, move_data_to_device(own, "cpu"), group=group)
            return [move_data_to_device(gathered[place], metric.device) for place in sources]

        return states

    for metric in module.modules():
        if isinstance(metric, Metric):
            sync_metric_with(metric, gather(metric))


@contextmanager
def unchanged_metrics(module: nn.Module) -> Iterator[None]:
    """Restore the torchmetrics objects of `module` afterwards: for micro-batches that only fill the
    schedule."""
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    before = [metric_state(metric) for metric in metrics]
    try:
        yield
    finally:
        for metric, state in zip(metrics, before, strict=True):
            restore_metric_state(metric, state)
