"""Ulysses: every rank gets some heads of all tokens (Jacobs et al., DeepSpeed-Ulysses,
arXiv:2309.14509)."""

from __future__ import annotations

from torch import Tensor

from lightning_3d.errors import LayoutError
from lightning_3d.parallel.context.collectives import heads_to_sequence, sequence_to_heads
from lightning_3d.parallel.context.kernels import Scores
from lightning_3d.parallel.context.masks import Mask
from lightning_3d.parallel.context.operators import local_attention


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scores: Scores,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks: an all-to-all of each of queries,
    keys and values, and one of the result; as many backward.

    Key heads that cannot be split evenly are repeated first. Arguments and result: see
    `ring_attention`.

    Raises:
        LayoutError: cp does not divide the heads.
    """
    context = mask.context
    heads = query.shape[1]
    if heads % context.size:
        raise LayoutError(
            f"cp_kind=ulysses splits the {heads} attention heads of a rank over cp={context.size}"
            f" ranks, but {heads} is not divisible by {context.size}. Use cp_kind=ring."
        )
    copies = key_copies(heads, key.shape[1], context.size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    mine = sinks.chunk(context.size)[context.rank] if sinks is not None else None
    query, key, value = (sequence_to_heads(x, context) for x in (query, key, value))
    return heads_to_sequence(local_attention(query, key, value, mask, scores, mine), context)


def key_copies(heads: int, key_heads: int, ranks: int) -> int:
    """Number of copies of each key head before they are split: the fewest that give every rank
    whole groups of query heads."""
    group = heads // key_heads
    return next(
        copies
        for copies in range(1, group + 1)
        if group % copies == 0 and key_heads * copies % ranks == 0
    )
