"""The collectives that Lightning asks a strategy for: gathering, barriers, broadcasts of objects, reductions of what is logged."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from typing_extensions import override

from lightning_3d.parallel.mesh import Mesh


class TrainerCollectives(ParallelStrategy):
    """A strategy whose ranks lie on a mesh."""

    def _may_communicate(self, what: str) -> bool:
        """Whether the other ranks are there; refuses what a step asks for that not all ranks run."""
        raise NotImplementedError

    def _require_mesh(self) -> Mesh:
        raise NotImplementedError

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._may_communicate("all_gather") else tensor

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._may_communicate("barrier"):
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not self._may_communicate("broadcast"):
            return obj
        told = [obj]
        dist.broadcast_object_list(told, src)
        return told[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks; tensor, context and pipeline replicas hold equal values, so that a mean is the mean over data ranks."""
        if not isinstance(tensor, Tensor) or not self._may_communicate("reduce"):
            return tensor
        mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        op = getattr(dist.ReduceOp, reduce_op.upper()) if isinstance(reduce_op, str) and not mean else reduce_op
        if group is None and isinstance(reduce_op, str) and reduce_op.lower() == "sum":
            group = self._require_mesh().group("dp")  # a sum must count what replicas hold once
        result = tensor.clone()
        dist.all_reduce(result, op=dist.ReduceOp.SUM if mean else op, group=group)
        return result / dist.get_world_size(group) if mean else result
