"""Inputs of DeepSpeed's engine: parameters, process groups and its configuration."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.parallel.mesh import Mesh


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
