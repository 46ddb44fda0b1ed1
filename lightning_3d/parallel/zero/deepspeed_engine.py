"""What surrounds DeepSpeed's engine: its inputs, its flat buffers, and what takes its place in dry
runs.

In a dry run tensors have shapes but no values, with which DeepSpeed cannot work. Reduction, norm,
clipping and gathering are ours and run unchanged. DeepSpeed's part of stages 1 to 3 is small: flat
buffers, master weights, the optimizer's step on them, and the all-gather of parameters after it.
`ShapeOnly` takes the place of `compat.deepspeed`, function by function, with the same allocations
and collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.compat.deepspeed import DeepSpeedGroup
from lightning_3d.compat.torch import all_gather_by_name, storage_key
from lightning_3d.parallel.mesh import Mesh
from lightning_3d.parallel.zero.gradients import Share, Slot
from lightning_3d.parallel.zero.trained import Trained, differs, merged, with_writes


class Holder(nn.Module):
    """Module that DeepSpeed's engine is built around: only the trained parameters.

    Its forward is never called. DeepSpeed does not get the rest of the model, because it would move
    and cast it.

    Args:
        stays: keep the parameters where they are, whatever device `to` asks for.
    """

    def __init__(self, parameters: list[nn.Parameter], *, stays: bool = False) -> None:
        super().__init__()
        self._stays = stays
        for index, parameter in enumerate(parameters):
            self.register_parameter(f"parameter_{index}", parameter)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        return self if self._stays else super().to(*args, **kwargs)


class Groups:
    """Process groups of a mesh under the names by which DeepSpeed asks its "mpu" for them.

    The model-parallel rank is the tensor-parallel one: DeepSpeed treats rank 0 as the owner of
    replicated parameters, and every pipeline stage has parameters of its own. `get_sequence_*` must
    not exist.

    Args:
        sharded: DeepSpeed shards state over the ranks of the shard group; otherwise each is in a
            group by itself.
    """

    def __init__(self, mesh: Mesh, *, sharded: bool = True) -> None:
        self._mesh = mesh
        self._group = mesh.shard_group if sharded else mesh.group_for((mesh.rank,))

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self.get_data_parallel_group())

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.group("tp", "pp")

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.size("tp") * self._mesh.size("pp")

    def get_model_parallel_rank(self) -> int:
        return self._mesh.index("tp")

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.group("tp")

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._mesh.size("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        return self._mesh.index("tp")

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._mesh.size("pp")


def deepspeed_config(
    dtype: torch.dtype, *, offload: bool = False, pin: bool = False
) -> dict[str, object]:
    """Make DeepSpeed's configuration. Its batch sizes are not used: micro-batches and scaling are
    the strategy's.

    Args:
        dtype: type of the trained parameters.
        offload: master weights, optimizer and its step are in host memory, with any optimizer of
            torch.
        pin: whether to page-lock the host buffers that are copied to and from the device.
    """
    zero: dict[str, object] = {"stage": 1, "overlap_comm": False, "contiguous_gradients": False}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": None,
        "gradient_clipping": 0.0,  # gradients are clipped already; the default is 1.0
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        # The check would skip steps. It also communicates with pipeline ranks that train nothing
        # and wait elsewhere.
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": False},
    }


class Partition:
    """This rank's part of one parameter group.

    Args:
        group: DeepSpeed's buffers.
        base: where the group begins in the flat buffer of all gradients.
        optimizer: has the state of `group.master`.
        device: of gradients. Master weights, and the parameters of `group` too, may be in host
            memory.
        experts: the parameters are parts of experts, sharded over the ranks that have the same
            ones; `base` counts among those.

    Attributes:
        slots: each parameter's place in the group.
        owned_slots: the pieces of parameters in this rank's part, counted from its start.
        gradient: reduced gradient of the part, float32, between reduction and step.
    """

    def __init__(
        self,
        group: DeepSpeedGroup,
        base: int,
        optimizer: Optimizer,
        device: torch.device,
        *,
        experts: bool = False,
    ) -> None:
        self.group = group
        self.experts = experts
        self.base = base
        self.numel = group.flat.numel()
        self.gradient: Tensor | None = None
        self._optimizer = optimizer
        self._device = device
        self._start = int(group.owned.storage_offset() - group.flat.storage_offset())
        self.slots = [_place(parameter, group.flat) for parameter in group.parameters]
        self.owned_slots = [
            Slot(
                slot.parameter,
                max(slot.start, self._start) - self._start,
                min(slot.stop, self._stop) - self._start,
            )
            for slot in self.slots
            if slot.start < self._stop and slot.stop > self._start
        ]

    @property
    def _stop(self) -> int:
        return self._start + self.group.owned.numel()

    def shares(self, ranks: Iterable[int]) -> list[Share]:
        """Share of each rank in the flat buffer of all gradients."""
        size = self.group.owned.numel()
        return [
            Share(rank, self.base + rank * size, self.base + (rank + 1) * size) for rank in ranks
        ]

    def sum_of_gradients(self) -> Tensor:
        """Return what gradients of this step are added to: zeros at first."""
        if self.gradient is None:
            self.gradient = torch.zeros(
                self.group.owned.numel(), dtype=torch.float32, device=self._device
            )
        return self.gradient

    @property
    def place(self) -> tuple[int, int]:
        """(start, stop) of this rank's part in the flat buffer of all gradients."""
        return self.base + self._start, self.base + self._stop

    def keep(self, gradient: Tensor) -> None:
        """Take the reduced gradient of this part."""
        self.gradient = gradient

    def keep_copy(self, gradient: Tensor) -> None:
        """Take it, but not the memory that it is a view of."""
        self.gradient = gradient.clone()

    @torch.no_grad()
    def follow_writes(self, slot: Slot) -> None:
        """Copy into the master weights what something other than the optimizer wrote into one
        piece."""
        master = self.group.master[slot.start : slot.stop]
        master.copy_(merged(master, self.group.owned[slot.start : slot.stop]))

    def differs(self, slot: Slot) -> Tensor:
        """Whether the master weights of one piece do not round to its parameter: bool, shape ()."""
        return differs(
            self.group.master[slot.start : slot.stop], self.group.owned[slot.start : slot.stop]
        )

    def copy_of(self, slot: Slot) -> dict[str, Tensor]:
        """Master weights and optimizer state of one piece."""
        return {
            name: tensor[slot.start : slot.stop].clone() for name, tensor in self.tensors().items()
        }

    def restore(self, slot: Slot, before: dict[str, Tensor]) -> None:
        """Put `copy_of` back; state that the optimizer has made since then begins at zero."""
        for name, tensor in self.tensors().items():
            piece = tensor[slot.start : slot.stop]
            piece.copy_(before[name]) if name in before else piece.zero_()

    def start_in_parameter(self, owned: Slot) -> int:
        """Index of the first element of an owned piece in the flattened parameter."""
        [whole] = [slot for slot in self.slots if slot.parameter is owned.parameter]
        return owned.start + self._start - whole.start

    def values_of(self, owned: Slot, to_save: bool = False) -> dict[str, Tensor | float]:
        """The optimizer's state of one piece, views where it is per element, and its master weights
        if they differ.

        Args:
            to_save: see `optimizer_shards`.
        """
        per_element = {
            key: tensor[owned.start : owned.stop] for key, tensor in self.tensors().items()
        }
        if self.group.owned.dtype == self.group.master.dtype:
            del per_element["master"]
        elif to_save:
            per_element["master"] = with_writes(
                per_element["master"], self.group.owned[owned.start : owned.stop]
            )
        state = self._optimizer.state.get(self.group.master, {})
        return {**{key: value for key, value in state.items() if value is not None}, **per_element}

    def tensors(self) -> dict[str, Tensor]:
        """Master weights and what the optimizer keeps for each element."""
        master = self.group.master
        state = self._optimizer.state.get(master, {})
        per_element = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and value.shape == master.shape
        }
        return {**per_element, "master": master.data}


@dataclass(frozen=True)
class OwnedPiece:
    """A piece of a parameter that this rank steps.

    Attributes:
        partition: the optimizer group that it is in.
        slot: its place in this rank's part of the group.
        entry: the parameter.
        first: element of the flattened parameter that the piece begins with.
    """

    partition: Partition
    slot: Slot
    entry: Trained
    first: int

    def sum_of_gradients(self) -> Tensor:
        """Return the part of the partition's that belongs to this piece."""
        return self.partition.sum_of_gradients()[self.slot.start : self.slot.stop]

    @property
    def gradient(self) -> Tensor:
        """View of the reduced gradient, flattened."""
        assert self.partition.gradient is not None
        return self.partition.gradient[self.slot.start : self.slot.stop]


def slots_of(partitions: Iterable[Partition]) -> list[Slot]:
    """All parameters of some partitions, one buffer behind the other."""
    return [
        Slot(slot.parameter, partition.base + slot.start, partition.base + slot.stop)
        for partition in partitions
        for slot in partition.slots
    ]


def _place(parameter: nn.Parameter, flat: Tensor) -> Slot:
    """Slot of a parameter in the buffer that it is a view of."""
    if storage_key(parameter) != storage_key(flat):
        raise RuntimeError(
            "DeepSpeed did not move a parameter into its flat buffer; this version is not"
            " supported."
        )
    start = int(parameter.storage_offset() - flat.storage_offset())
    return Slot(parameter, start, start + parameter.numel())


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
