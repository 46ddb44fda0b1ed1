"""What a data module asks a trainer for, without a trainer."""

from types import SimpleNamespace
from typing import Any

import torch


def trainer_of(replicas: int, rank: int) -> Any:
    """A trainer of one data-parallel rank, before its first step."""
    counts = (SimpleNamespace(ready=0, processed=0) for _ in range(2))
    progress = SimpleNamespace(current=next(counts), total=next(counts), is_last_batch=False)
    return SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": replicas, "rank": rank},
        strategy=SimpleNamespace(data_parallel_size=replicas, root_device=torch.device("cpu")),
        global_step=0,
        ckpt_path=None,
        current_epoch=0,
        max_steps=-1,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress), restarting=False, _combined_loader=None),
    )
