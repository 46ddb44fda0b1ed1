"""picotron (https://github.com/huggingface/picotron) as a contender of `peers_worker.py`, on CPU.

Its own model, tensor parallelism, pipeline, buckets of gradients and train steps run as they are.
Only what ties it to CUDA is replaced:

- `flash_attn`, which it imports even where it does not use it, is an empty module, and
  `FLASH_ATTEN=0` selects torch's attention;
- `torch.cuda.synchronize`, which it calls after every message, does nothing.

It reads weights from a file and tokens from a data set; here it initializes its own weights and
reads the tokens of the other contenders. It does not clip gradients, so it does less work than the
others: they compute the global norm of all gradients and scale by it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers_worker import Turns
    from torch import Tensor

FOLDER = "LIGHTNING_3D_BENCHMARK_PICOTRON"
"""Environment variable: the folder with picotron's source."""

ENVIRONMENT = {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32", "CONTEXT_PARALLEL": "0"}
"""What its train.py sets before it imports its own modules. DTYPE is that of its rotary
positions."""

_STUBS = {
    "flash_attn.flash_attn_interface": "flash_attn_func",
    "flash_attn.layers.rotary": "apply_rotary_emb",
    "flash_attn.ops.triton.layer_norm": "layer_norm_fn",
}
"""Modules that it imports: name -> the function that it takes from it."""


def picotron(layout: str, steps: int, turns: Turns) -> None:
    """Its train.py without checkpoints, logs and downloads: float32, AdamW, 1F1B, buckets of 25
    MiB. Gradients are not clipped."""
    import torch
    import torch.distributed as dist
    from peers_worker import LEARNING_RATE, LLAMA, MICRO_BATCH, SEQUENCE

    from lightning_3d.layout import Layout

    _import(os.environ[FOLDER])
    import picotron.process_group_manager as manager  # type: ignore[import-not-found]
    from picotron.data_parallel.data_parallel import DataParallelBucket  # type: ignore[import-not-found]
    from picotron.pipeline_parallel.pipeline_parallel import train_step_pipeline_1f1b  # type: ignore[import-not-found]
    from picotron.utils import average_loss_across_dp_cp_ranks  # type: ignore[import-not-found]

    degrees, device = Layout.parse(layout), torch.device("cpu")
    dist.init_process_group("gloo")
    manager.setup_process_group_manager(
        tp_size=degrees.tp, cp_size=1, pp_size=degrees.pp, dp_size=degrees.dp
    )
    torch.manual_seed(0)
    model = _model(degrees.tp, degrees.pp)
    if degrees.dp > 1:
        model = DataParallelBucket(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = Batches(steps, manager.process_group_manager.dp_rank, degrees.dp)
    shapes = (MICRO_BATCH, SEQUENCE, LLAMA["hidden_size"])
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (
            train_step_pipeline_1f1b(model, batches, shapes, device, torch.float32)
            if degrees.pp > 1
            else _train_step(model, batches)
        )
        average_loss_across_dp_cp_ranks(loss, device)
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()
        turns.step_ended()


def _import(folder: str) -> None:
    """Import its modules on a machine without CUDA. The stubs go again, because Transformers looks
    whether there is a `flash_attn`."""
    import torch

    os.environ.update(ENVIRONMENT)
    sys.path.insert(0, folder)
    stubs: dict[str, Any] = {}
    for name, function in _STUBS.items():
        parts = name.split(".")
        stubs |= {
            parent: ModuleType(parent)
            for parent in (".".join(parts[: n + 1]) for n in range(len(parts)))
            if parent not in stubs
        }
        setattr(stubs[name], function, None)
    sys.modules.update(stubs)
    import_module("picotron.model")
    for name in stubs:
        del sys.modules[name]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]


def _model(tp: int, pp: int) -> Any:
    """Its Llama of the size of `peers_worker.LLAMA`, partitioned by its own functions."""
    from peers_worker import llama_config
    from picotron.model import Llama  # type: ignore[import-not-found]
    from picotron.pipeline_parallel.pipeline_parallel import PipelineParallel
    from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # type: ignore[import-not-found]

    config = llama_config()
    # where older versions of Transformers, which it was written for, have it
    config.rope_theta = 10000.0
    model = Llama(config)
    if tp > 1:
        model = apply_tensor_parallel(model)
    return PipelineParallel(model, config) if pp > 1 else model


class Batches:
    """Micro-batches of one data rank as its data loader gives them. The last token of a row has no
    target, as for the other contenders."""

    def __init__(self, steps: int, dp_rank: int, dp: int) -> None:
        from peers_worker import GLOBAL_BATCH, MICRO_BATCH, micro_batches

        self.grad_acc_steps = GLOBAL_BATCH // MICRO_BATCH // dp
        self._rows: Iterator[Tensor] = micro_batches(steps, dp_rank, dp)

    def __next__(self) -> dict[str, Any]:
        import torch

        rows = next(self._rows)
        targets = rows.roll(-1, 1)
        targets[:, -1] = -100
        positions = torch.arange(rows.shape[1]).expand(len(rows), -1)
        return {
            "input_ids": rows,
            "target_ids": targets,
            "position_ids": positions,
            "hidden_states": None,
        }


def _train_step(model: Any, batches: Batches) -> float:
    """A step without a pipeline, which its train.py has beside its command line: gradients are
    reduced in the last backward."""
    import torch.nn.functional as F

    total = 0.0
    for index in range(batches.grad_acc_steps):
        batch = next(batches)
        model.require_backward_grad_sync = index == batches.grad_acc_steps - 1
        logits = model(input_ids=batch["input_ids"])
        loss = (
            F.cross_entropy(logits.flatten(0, 1), batch["target_ids"].flatten())
            / batches.grad_acc_steps
        )
        loss.backward()
        total += loss.item()
    return total
