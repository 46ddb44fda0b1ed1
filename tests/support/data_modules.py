"""What a data module asks a trainer for, without a trainer."""

from types import SimpleNamespace
from typing import Any

import torch

from lightning_3d.app.training.data import make_data_module
from lightning_3d.app.training.data.file_check import check_files


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
        fit_loop=SimpleNamespace(
            epoch_loop=SimpleNamespace(batch_progress=progress),
            restarting=False,
            _combined_loader=None,
        ),
    )


def blend_of(
    sources: dict[str, Any], *, sequence_length: int, global_batch_size: int, steps: int
) -> Any:
    """A data module of a blend for a run of so many steps on one rank, ready to be read."""
    given = {
        "name": "blend",
        "sources": sources,
        "sequence_length": sequence_length,
        "global_batch_size": global_batch_size,
        "seed": 3,
    }
    check_files(given, steps)
    data = make_data_module(given)
    data.trainer = trainer_of(1, 0)
    data.trainer.max_steps = steps
    data.prepare_data()
    data.setup()
    return data
