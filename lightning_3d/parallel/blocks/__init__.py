"""Wrappers around the forward of a model's blocks: recomputation (activation checkpointing),
offload to host memory of the tensors that the backward needs, and `torch.compile`. They are applied
to the whole model before it is sharded.
"""

from lightning_3d.parallel.blocks.recompute import attention_of
from lightning_3d.parallel.blocks.wrap import Compilation, find_blocks, process_blocks

__all__ = ["Compilation", "attention_of", "find_blocks", "process_blocks"]
