"""Context parallelism: the tokens of a sequence split over ranks, and attention between them."""

from lightning_3d.parallel.context.collectives import sum_over_ranks
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.model import WholeSequenceLoss, share_sequences

__all__ = ["ContextParallel", "WholeSequenceLoss", "share_sequences", "sum_over_ranks"]
