"""Losses that a model of token frequencies alone would reach, to compare with a validation loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Entropy:
    """Entropies of a sequence of tokens, in nats per token, under its own frequencies.

    Attributes:
        unigram: H(x_t), the loss of a model that ignores its context.
        bigram: H(x_t | x_{t-1}), the loss of a model that sees the previous token.
    """

    unigram: float
    bigram: float


def entropy(tokens: np.ndarray) -> Entropy:
    """Compute unigram and bigram entropy from counts of tokens and of neighbouring pairs.

    Both are lower bounds for such models, because the frequencies are those of the measured tokens.
    If the vocabulary is far larger than the number of tokens, the bigram value is near zero and
    says little.

    Args:
        tokens: (tokens,) of an unsigned integer type, at least two.
    """
    if len(tokens) < 2:
        return Entropy(0.0, 0.0)
    counts = np.bincount(tokens)
    pairs = _count_pairs(tokens, len(counts))
    of_first = counts.copy()
    of_first[tokens[-1]] -= 1
    return Entropy(_entropy(counts), _entropy(pairs) - _entropy(of_first))


def _count_pairs(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """Count the pairs that occur, in no particular order."""
    if vocab * vocab <= 1 << 24:
        total = np.zeros(vocab * vocab, dtype=np.int64)
        for start in range(0, len(tokens) - 1, _CHUNK):
            run = tokens[start : start + _CHUNK + 1].astype(np.int64)
            total += np.bincount(run[:-1] * vocab + run[1:], minlength=vocab * vocab)
        return total
    wide = tokens.astype(np.int64)
    return np.unique(wide[:-1] * vocab + wide[1:], return_counts=True)[1]


def _entropy(counts: np.ndarray) -> float:
    """Entropy in nats of the distribution that the counts estimate."""
    probabilities = counts[counts > 0] / counts.sum()
    return float(-(probabilities * np.log(probabilities)).sum())
