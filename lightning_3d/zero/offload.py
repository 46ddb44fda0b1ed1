"""Which optimizers step weights that lie in host memory, where ZeRO-Offload has them (arXiv:2101.06840)."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from lightning_3d.errors import ConfigError

HOST_ONLY = ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad")
"""Optimizers that step nothing but weights in host memory."""

GPU_ONLY = ("apex", "bitsandbytes", "transformer_engine")
"""Packages whose optimizers are GPU kernels."""

WORKS = "torch.optim.AdamW, best with fused=True, or deepspeed.ops.adam.DeepSpeedCPUAdam"


def check_place(optimizer: Optimizer, device: torch.device, *, offloaded: bool) -> None:
    """Refuse an optimizer that cannot step weights where they are.

    Args:
        device: of the parameters. offloaded: the weights that the optimizer steps are in host memory whatever that is.
    """
    name = type(optimizer).__name__
    if not offloaded:
        if name in HOST_ONLY and device.type != "cpu":
            raise ConfigError(
                f"{name} steps weights in host memory, but without zero_offload they are on {device}. Use zero_offload=optimizer with a"
                " zero_stage above 0, or torch.optim.AdamW."
            )
        return
    package = type(optimizer).__module__.partition(".")[0]
    if package in GPU_ONLY or (package == "deepspeed" and name.startswith("Fused")):
        raise ConfigError(
            f"{name} of {package} runs on GPUs only, but zero_offload steps in host memory. Use {WORKS}, or zero_offload=none."
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} with capturable=True counts its steps on the GPU, but zero_offload steps in host memory. Leave capturable out, or use"
            " zero_offload=none."
        )


def rounds_by_place(optimizer: Optimizer) -> bool:
    """Whether on a CPU the update of an element depends on its place in the tensor.

    Kernels for the whole update compute the last elements of a tensor, too few for a vector instruction, with other roundings than all
    others (DeepSpeed 0.19, torch 2.13: 6e-8 after 30 steps). Copies that several ranks step, tied ones for example, would drift apart.
    """
    return type(optimizer).__name__ in HOST_ONLY or any(group.get("fused") for group in optimizer.param_groups)


VECTOR = 16
"""Elements of the widest vector of a CPU, in float32: 512 bits. A tensor of a multiple of them has no such last elements."""
