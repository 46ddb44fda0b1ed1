"""How likely a layout fits in the memory of a GPU. Pure Python.

What a run needs differs from its prediction: blocks of the allocator that no later tensor fits in,
buffers of collectives, CUDA's own memory, and what the first step and checkpoints add. `python -m
benchmarks.planner_accuracy FILE.csv --failed FAILED.csv` estimates how far needed and predicted
memory differ, from 585 published runs that fit and 565 that failed.
"""

from __future__ import annotations

from functools import lru_cache
from math import exp, log
from statistics import NormalDist

SPREAD = 0.13
"""Standard deviation of the logarithm of needed / predicted memory, taken as normal without a bias.
The runs give 0.12."""


def fit_probability(predicted: float, memory: float, spread: float = SPREAD) -> float:
    """Return the probability, 0 to 1, that a run fits in `memory` bytes if `predicted` bytes are
    predicted for it."""
    return NormalDist(0.0, spread).cdf(log(memory / predicted)) if predicted > 0 else 1.0


@lru_cache(maxsize=64)
def largest_share(risk: float, spread: float = SPREAD) -> float:
    """Return the largest predicted share of a GPU's memory with which a run fails with at most this
    probability.

    Args:
        risk: probability, above 0 and at most 0.5; at 0.5 the whole memory may be predicted.
        spread: as `SPREAD`.
    """
    return exp(-NormalDist(0.0, spread).inv_cdf(1 - risk))
