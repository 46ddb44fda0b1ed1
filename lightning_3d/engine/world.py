"""The process group and the device of an engine whose caller has not made them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_3d.compat.rank_zero import set_rank
from lightning_3d.compat.torch import settle_gloo_at_exit
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout


def own_device() -> torch.device:
    """Return the GPU with this process's number on its machine, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def connect(device: torch.device, timeout: timedelta) -> bool:
    """Initialize the default process group, unless there is one: from the variables of torchrun, or
    of this process alone.

    Returns:
        Whether it was made here, so that the caller must destroy it.
    """
    made = not dist.is_initialized()
    if made:
        settle_gloo_at_exit()
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
    set_rank(dist.get_rank())
    return made


def require_unbound(layout: Layout) -> None:
    """Refuse a pipeline on a process group that is bound to a device: its groups have one
    communicator for all messages of a rank, so that a send of a middle stage waits for the receives
    posted before it (`compat.lightning_launch.connect_process_group`).

    Raises:
        ConfigError: on all ranks.
    """
    world = dist.group.WORLD
    if layout.pp > 1 and world is not None and world.bound_device_id is not None:
        raise ConfigError(
            "The process group is bound to a device (init_process_group(device_id=...), which"
            f" Fabric does on GPUs), so the stages of {layout} would wait for each other. Start the"
            " script with torchrun, so that the engine makes the process group, or leave out"
            " device_id."
        )


def ranks_of_a_node() -> int | None:
    """Return the number of ranks of each node; None for one node, and where nobody has said."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return here if 0 < here < dist.get_world_size() else None
