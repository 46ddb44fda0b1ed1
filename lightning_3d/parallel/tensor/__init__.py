"""Tensor parallelism: layers sharded over the ranks of a stage by a plan, as plain tensors, with
one collective per region."""

from lightning_3d.parallel.tensor.checks import check_replicated_gradients, refuse_computed_weights
from lightning_3d.parallel.tensor.experts import TokenParts
from lightning_3d.parallel.tensor.group import TensorParallel
from lightning_3d.parallel.tensor.logits import VocabParallelLogits
from lightning_3d.parallel.tensor.loss import token_losses, vocab_parallel_cross_entropy
from lightning_3d.parallel.tensor.resolve_plan import cuts_here, resolve
from lightning_3d.parallel.tensor.rewrite import rewrite, shard_specs
from lightning_3d.parallel.tensor.sequence_parallel import (
    SequenceRegions,
    find_regions,
    gather_regions,
    pays_off,
    shard_sequence,
)
from lightning_3d.parallel.tensor.style_trials import fit_styles
from lightning_3d.parallel.tensor.whole import gather_shards, whole

__all__ = [
    "SequenceRegions",
    "TensorParallel",
    "TokenParts",
    "VocabParallelLogits",
    "check_replicated_gradients",
    "cuts_here",
    "shard_sequence",
    "find_regions",
    "pays_off",
    "fit_styles",
    "gather_regions",
    "gather_shards",
    "refuse_computed_weights",
    "resolve",
    "rewrite",
    "shard_specs",
    "token_losses",
    "vocab_parallel_cross_entropy",
    "whole",
]
