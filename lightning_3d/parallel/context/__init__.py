"""Context parallelism: the tokens of a sequence split over ranks, and attention between them."""

from lightning_3d.parallel.context.checks import mixes_by_attention
from lightning_3d.parallel.context.collectives import sum_over_ranks
from lightning_3d.parallel.context.frozen import share_frozen
from lightning_3d.parallel.context.full_sequence import WholeSequence
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.model import WholeSequenceLoss, share_sequences
from lightning_3d.parallel.context.operators import forget_masks
from lightning_3d.parallel.context.split_blocks import SplitBlocks, is_split, use_context

__all__ = [
    "ContextParallel",
    "SplitBlocks",
    "WholeSequence",
    "WholeSequenceLoss",
    "forget_masks",
    "is_split",
    "mixes_by_attention",
    "share_frozen",
    "share_sequences",
    "sum_over_ranks",
    "use_context",
]
