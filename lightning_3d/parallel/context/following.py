"""The tokens that follow those of a rank: multi-token prediction reads, for each position, the
embeddings of the next ones.

A rank has two chunks of a sequence (`zigzag`). What follows within a chunk is here; behind its end,
it is the first tokens of the next chunk, which another rank has, or this one. So all ranks gather
the first few tokens of every chunk, and nothing else travels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.parallel.context.collectives import gather_sequence
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.zigzag import chunk_starts, own_tokens


class TokensOfOthers:
    """Mixin for a `MultiTokenLM` that is called with this rank's part of the sequences, but with
    the labels of whole ones."""

    context_parallel: ContextParallel
    mtp_layers: int

    def tokens_ahead(self, values: Tensor) -> Iterator[Tensor]:
        """Yield what stands 1, 2, ... `mtp_layers` tokens after each of this rank's tokens, see
        `following_tokens`."""
        return following_tokens(values, self.mtp_layers, self.context_parallel)

    def own_targets(self, targets: Tensor) -> Tensor:
        """Select this rank's positions of targets (batch, seq)."""
        return own_tokens(targets, self.context_parallel.size, self.context_parallel.rank)


def following_tokens(own: Tensor, most: int, context: ContextParallel) -> Iterator[Tensor]:
    """Yield for each distance from 1 to `most` what stands so many tokens after each of this rank's
    tokens in the whole sequence, and zeros where nothing does.

    Args:
        own: (batch, seq / cp, hidden), this rank's tokens in its order. So are the results.

    Communicates: one all-gather of `most` tokens of each chunk over the context-parallel group; one
    reduce-scatter in the backward, which adds the gradients that other ranks have for a token to
    this rank's.
    """
    chunk = own.shape[1] // 2
    # Of chunks that are shorter than the distance, all tokens: then the gathered ones are the whole
    # sequence.
    edge = min(most, chunk)
    parts = own.chunk(2, dim=1)
    edges = gather_sequence(torch.cat([part[:, :edge] for part in parts], dim=1), context)
    behind = []
    for start in chunk_starts(edge, context.size, context.rank):
        found = edges[:, start + edge : start + edge + most]
        behind.append(F.pad(found, (0, 0, 0, most - found.shape[1])))
    for distance in range(1, most + 1):
        pieces = [
            (part[:, distance:], after[:, max(distance - chunk, 0) : distance])
            for part, after in zip(parts, behind, strict=True)
        ]
        yield torch.cat([piece for pair in pieces for piece in pair], dim=1)
