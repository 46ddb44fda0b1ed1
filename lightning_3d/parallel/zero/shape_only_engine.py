"""ZeRO in a dry run, where tensors have shapes but no values: DeepSpeed's engine for shapes.

Reduction, norm, clipping and gathering are ours and run unchanged. DeepSpeed's part of stages 1 to
3 is small: flat buffers, master weights, the optimizer's step on them, and the all-gather of
parameters after it. It cannot work on fake tensors, so this takes the place of `deepspeed_compat`,
function by function, with the same allocations and the same collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.compat.deepspeed import DeepSpeedGroup
from lightning_3d.compat.torch import all_gather_by_name

ALIGNMENT = 2
"""Elements of each rank's part of a flat buffer are a multiple of this
(`nccl_start_alignment_factor` of DeepSpeed 0.19)."""


@dataclass
class _Group:
    """A parameter group: DeepSpeed's buffers, the group of the optimizer, and the ranks that share
    it."""

    buffers: DeepSpeedGroup
    of_optimizer: dict[str, Any]
    ranks: Any


class ShapeOnlyEngine:
    """DeepSpeed's engine with ZeRO stage 1: as `DeepSpeedZeroOptimizer` (0.19), but for tensors
    without values."""

    def __init__(
        self, optimizer: Any, groups: Any, *, offload: bool, on_host: bool, expert_group: Any
    ) -> None:
        self._optimizer = optimizer
        self._offload = offload
        self._gradients: Sequence[Tensor] = ()
        self.groups = [
            self._flatten(
                group,
                expert_group if group.get("moe") else groups.get_data_parallel_group(),
                on_host,
            )
            for group in optimizer.param_groups
        ]

    def _flatten(self, group: dict[str, Any], ranks: Any, on_host: bool) -> _Group:
        parameters = list(group["params"])
        count = dist.get_world_size(ranks)
        numel = sum(parameter.numel() for parameter in parameters)
        flat = (
            parameters[0].new_empty(-(-numel // (ALIGNMENT * count)) * ALIGNMENT * count).detach()
        )
        start = 0
        for parameter in parameters:
            parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
        owned = flat.view(count, -1)[dist.get_rank(ranks)]
        master = nn.Parameter(owned.to(torch.float32, copy=True))
        if self._offload:
            master.grad = torch.zeros_like(master)
        self._host = None if not self._offload or on_host else torch.empty_like(owned)
        group["params"] = [master]
        return _Group(DeepSpeedGroup(parameters, flat, owned, master), group, ranks)

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        if self._offload:
            for group, gradient in zip(self.groups, gradients, strict=True):
                assert group.buffers.master.grad is not None
                group.buffers.master.grad.copy_(gradient)
            return
        self._gradients = gradients

    @torch.no_grad()
    def step(self, *, gathers: bool = True) -> None:
        everything = self._optimizer.param_groups
        for index, group in enumerate(self.groups):
            master, owned = group.buffers.master, group.buffers.owned
            if not self._offload:
                master.grad = self._gradients[index].to(master.dtype)
            self._optimizer.param_groups = [group.of_optimizer]
            self._optimizer.step()
            if not self._offload:
                master.grad = None
            owned.copy_(master)
        self._optimizer.param_groups = everything
        self._gradients = ()
        for group in self.groups if gathers else ():
            if dist.get_world_size(group.ranks) > 1:
                all_gather_by_name(group.buffers.flat, group.buffers.owned, group.ranks)


class ShapeOnly:
    """The functions of `deepspeed_compat` that a backend calls, by their names there."""

    @staticmethod
    def import_deepspeed(device: torch.device) -> None:
        """Do nothing: DeepSpeed is not needed."""

    @staticmethod
    def deepspeed_engine(
        module: nn.Module,
        optimizer: Any,
        groups: Any,
        config: dict[str, Any],
        device: torch.device,
        *,
        on_host: bool = False,
        expert_group: Any = None,
    ) -> ShapeOnlyEngine:
        offload = "offload_optimizer" in config["zero_optimization"]
        return ShapeOnlyEngine(
            optimizer, groups, offload=offload, on_host=on_host, expert_group=expert_group
        )

    @staticmethod
    def deepspeed_groups(engine: ShapeOnlyEngine) -> list[DeepSpeedGroup]:
        return [group.buffers for group in engine.groups]

    @staticmethod
    def set_deepspeed_gradients(engine: ShapeOnlyEngine, gradients: Sequence[Tensor]) -> None:
        engine.set_gradients(gradients)

    @staticmethod
    def step_without_gathering(engine: ShapeOnlyEngine) -> None:
        engine.step(gathers=False)

    @staticmethod
    def revive_cpu_adam(optimizer: Any) -> None:
        """The step of an optimizer that is C++ has no shapes; nothing to revive."""

    @staticmethod
    def release_deepspeed(engine: ShapeOnlyEngine) -> None:
        engine.groups = []
