"""Gives the ranks before the last stage what the step returned there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.compat.batches import move_data_to_device
from lightning_3d.parallel.collectives import all_reduce_flat
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.pipeline import PipelineEngine


class _OnDevice(NamedTuple):
    """A number that travels on the device: its place and its type."""

    place: int
    dtype: torch.dtype


class StageOutputs:
    """Sends outputs of the last stage over the pipeline. Without one, nothing is sent.

    Args:
        mesh: process groups.
        engine: the pipeline.
        device: device of this rank.
    """

    def __init__(self, mesh: Mesh, engine: PipelineEngine, device: torch.device) -> None:
        self._mesh, self._engine, self._device = mesh, engine, device

    def broadcast(self, outputs: Any, *, whole: bool) -> Any:
        """Broadcast outputs in host memory, which waits for the device. Without `whole`, the other
        ranks get the numbers among them."""
        if self._mesh.size("pp") == 1:
            return outputs
        return self._received(
            outputs, move_data_to_device(outputs if whole else _scalars(outputs), "cpu")
        )

    def count(self, outputs: dict[str, Any]) -> int:
        """Count the numbers that `share` would send; 0 before the last stage and without a
        pipeline."""
        sends = self._mesh.size("pp") > 1 and self._engine.owns_last
        return sum(1 for _ in _leaves(_scalars(outputs))) if sends else 0

    def share(self, outputs: dict[str, Any], most: int) -> dict[str, Any]:
        """Give the other ranks the numbers among outputs, without waiting for the device: one
        broadcast of their names in host memory, and one all-reduce of dp * cp * `most` numbers over
        ("cp", "pp", "dp") on the device.

        Args:
            most: the largest `count` of any rank.
        """
        rows = torch.zeros(
            self._mesh.size("dp"),
            self._mesh.size("cp"),
            most,
            dtype=torch.float64,
            device=self._device,
        )
        own = rows[self._mesh.index("dp"), self._mesh.index("cp")]
        sent: list[Tensor] = []

        def describe(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.device != self._device or value.is_complex():
                return value
            sent.append(value.detach().to(torch.float64))
            return _OnDevice(len(sent) - 1, value.dtype)

        described = _mapped(_scalars(outputs), describe) if self._engine.owns_last else None
        if sent:
            own[: len(sent)] = torch.stack(sent)
        all_reduce_flat(rows, self._mesh.group("cp", "pp", "dp"))
        found = self._received(outputs, described)
        return _mapped(
            found,
            lambda value: (
                own[value.place].to(value.dtype) if isinstance(value, _OnDevice) else value
            ),
        )

    def _received(self, outputs: Any, sent: Any) -> Any:
        """Broadcast what the last stage sends, in host memory. Returns its own outputs there, what
        it has sent elsewhere."""
        objects = [sent]
        dist.broadcast_object_list(
            objects, self._mesh.ranks("pp")[self._engine.last_rank], group=self._mesh.control
        )
        return outputs if self._engine.owns_last else move_data_to_device(objects[0], self._device)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return (
        {key: _mapped(item, change) for key, item in value.items()}
        if isinstance(value, Mapping)
        else change(value)
    )


def _leaves(value: Any) -> Iterator[Any]:
    if not isinstance(value, Mapping):
        yield value
        return
    for item in value.values():
        yield from _leaves(item)


def _scalars(value: Any) -> Any:
    """Select the numbers among an output."""
    if isinstance(value, Mapping):
        return {key: _scalars(item) for key, item in value.items() if _scalars(item) is not None}
    if isinstance(value, Tensor):
        return value if value.ndim == 0 else None
    return value if isinstance(value, (int, float, str, bool)) else None
