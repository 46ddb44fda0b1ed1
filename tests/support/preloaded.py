"""What the fork server of `ranks` imports of this project and what a first fit would import, so that no rank pays for it again."""

import contextlib

import parity  # noqa: F401
import torch

from lightning_3d.compat.deepspeed import import_deepspeed

with contextlib.suppress(ImportError):
    import_deepspeed(torch.device("cpu"))
