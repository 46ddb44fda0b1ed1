"""The number of threads that torch uses on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist


def agree_on_cpu_threads(device: torch.device) -> None:
    """Use the same number of threads on all ranks that compute on CPU: the smallest that one of
    them has.

    Sums over rows are split between threads, so another number of threads rounds them differently.
    Replicas would then differ in their last bits, and drift apart. Ranks have unequal numbers if a
    node has fewer cores, or if a launcher limits only some of them.
    """
    if device.type != "cpu" or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    threads = torch.tensor(torch.get_num_threads())
    dist.all_reduce(threads, dist.ReduceOp.MIN)
    torch.set_num_threads(int(threads))
