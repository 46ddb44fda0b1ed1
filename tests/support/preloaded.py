"""What the fork server of `ranks` imports of this project and what a first fit would import, so
that no rank pays for it again."""

import contextlib
import importlib
import os

import parity  # noqa: F401
import torch

from lightning_3d.compat.deepspeed import import_deepspeed

WHAT_A_FIT_IMPORTS = (
    "lightning_3d.strategy",
    "lightning_3d.ranks.children",
    "lightning_3d.parallel.gloo_exchange",
    "lightning_3d.parallel.zero",
    "lightning_3d.parallel.blocks",
    "lightning_3d.engine.step.tracer",
    "lightning_3d.checkpoint.torch_archive",
    "lightning_3d.checkpoint.remote_folder",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    "deepspeed.utils.pin_memory",
    "encodings.idna",
    "torch.profiler._cupti_monitor",
)

with contextlib.suppress(ImportError):
    import_deepspeed(torch.device(os.environ.get("DS_ACCELERATOR", "cpu")))
for name in WHAT_A_FIT_IMPORTS:
    with contextlib.suppress(ImportError):  # another version has another tree
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    # Ranks compute as on GPUs: with sequence parallelism by default, which they leave out over
    # gloo. `tests/strategy/test_communication.py` tests the default of ranks over gloo.
    sequence_parallel = importlib.import_module("lightning_3d.parallel.tensor.sequence_parallel")
    sequence_parallel.uses_gloo = lambda group: False  # type: ignore[attr-defined]
