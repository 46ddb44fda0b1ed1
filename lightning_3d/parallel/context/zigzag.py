"""Assignment of tokens to ranks that gives every rank the same work in causal attention.

A sequence is split into 2 * cp chunks, and rank r has the chunks 2 * cp - 1 - r and r, in this
order: a late one with much before it and an early one with little.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_3d.errors import DataError


def chunk_length(length: int, size: int) -> int:
    """Number of tokens in each of the 2 * size chunks of a sequence.

    Raises:
        DataError: the sequence cannot be split into as many equal ones.
    """
    chunks = 2 * size
    if length % chunks or length == 0:
        raise DataError(
            f"Context parallelism splits a sequence into 2 * cp = {chunks} equal chunks, but this"
            f" batch has sequences of {length} tokens. Pad them to a multiple of {chunks}, for"
            f" example {(length // chunks + 1) * chunks}."
        )
    return length // chunks


def chunk_starts(chunk: int, size: int, rank: int) -> tuple[int, int]:
    """First positions of the two chunks that a rank has, in the order in which it has them."""
    return (2 * size - 1 - rank) * chunk, rank * chunk


def positions(length: int, size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Positions of the tokens of a rank, in its order."""
    chunk = chunk_length(length, size)
    return _ranges(chunk_starts(chunk, size, rank), chunk, device)


def own_tokens(whole: Tensor, size: int, rank: int) -> Tensor:
    """Select the tokens of a rank, in its order, from a tensor (batch, seq, ...) of all."""
    return whole[:, positions(whole.shape[1], size, rank, whole.device)]


def natural_order(length: int, size: int, device: torch.device | None = None) -> Tensor:
    """Index of each token of the sequence in the concatenated parts of all ranks."""
    chunk = chunk_length(length, size)
    starts = [start for rank in range(size) for start in chunk_starts(chunk, size, rank)]
    return _ranges(
        [starts.index(start) * chunk for start in range(0, length, chunk)], chunk, device
    )


def _ranges(
    starts: tuple[int, ...] | list[int], length: int, device: torch.device | None
) -> Tensor:
    return torch.cat([torch.arange(start, start + length, device=device) for start in starts])
