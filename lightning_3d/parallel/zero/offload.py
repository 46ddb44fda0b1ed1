"""Checks of optimizers that step weights in host memory, where ZeRO-Offload keeps them
(arXiv:2101.06840)."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_3d.errors import ConfigError
from lightning_3d.options.optimizer import offload_refusal
from lightning_3d.parallel.zero.muon import MuonWithAdamW

CPU_ADAM = "DeepSpeedCPUAdam"
"""Can step only weights in host memory."""

GPU_ONLY = ("apex", "bitsandbytes", "transformer_engine")
"""Packages whose optimizers are GPU kernels."""

WORKS = "torch.optim.AdamW, best with fused=True, or deepspeed.ops.adam.DeepSpeedCPUAdam"


def check_place(optimizer: Optimizer, *, offloaded: bool) -> None:
    """Refuse an optimizer that cannot step weights where they are.

    Args:
        offloaded: the weights that it steps are in host memory, whatever device the parameters are
            on.
    """
    name = type(optimizer).__name__
    if name in ("DeepSpeedCPULion", "DeepSpeedCPUAdagrad"):
        raise ConfigError(f"{name} is not supported. Use {WORKS}.")
    if not offloaded:
        if name == CPU_ADAM:
            raise ConfigError(
                f"{name} updates weights in host memory, which needs zero_offload=optimizer and a"
                " zero_stage above 0. Set these, or use torch.optim.AdamW."
            )
        return
    if isinstance(optimizer, MuonWithAdamW):
        raise ConfigError(offload_refusal())
    package = type(optimizer).__module__.partition(".")[0]
    if package in GPU_ONLY or (package == "deepspeed" and name.startswith("Fused")):
        raise ConfigError(
            f"{name} of {package} runs on GPUs only, but zero_offload updates weights in host"
            f" memory. Use {WORKS}, or zero_offload=none."
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise ConfigError(
            f"{name} with capturable=True counts its steps on the GPU, but zero_offload updates"
            " weights in host memory. Remove capturable, or use zero_offload=none."
        )


def rounds_by_place(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's update of an element on a CPU depends on the element's place in
    the tensor.

    Kernels for the whole update compute the last elements of a tensor, too few for a vector
    instruction, rounding them differently from the others (DeepSpeed 0.19, torch 2.13: 6e-8 after
    30 steps). Copies that several ranks step, tied ones for example, would drift apart.
    """
    return type(optimizer).__name__ == CPU_ADAM or any(
        group.get("fused") for group in optimizer.param_groups
    )


VECTOR = 16
"""Elements of the widest vector of a CPU, in float32: 512 bits. A tensor of a multiple of them has
no such last elements."""
