"""Wrappers around the forward of a model's blocks: recomputation (activation checkpointing), offload of what the backward needs to
host memory, `torch.compile`. Applied to the whole model, before it is sharded.
"""

from lightning_3d.parallel.blocks.compilation import Compilation
from lightning_3d.parallel.blocks.wrap import find_blocks, process_blocks

__all__ = ["Compilation", "find_blocks", "process_blocks"]
