"""How far results may be apart that only rounding distinguishes, each with its reason. Relative to
the largest value."""

from __future__ import annotations

import torch

SAME_TOKENS = 1e-6
"""Results in float64 that must not depend on other tokens. Models compute softmax, norms and rotary
positions in float32 (6e-8), and the influence of a far token may be small."""

SUM_OF_SHARDS = 1e-3
"""Results in float64 of one module and of its shards, added up. A module may compute inside in a
narrower type, and a style that does not fit is off by about 1."""

SAME_COLUMNS = 1e-4
"""Input of a row-parallel layer on a shard, in the norm: float32, in products of other widths."""

SAME_PRODUCT = 1e-12
"""A linear layer in float64 and x W^T + b: nothing in it may compute in a narrower type."""

SAME_STEPS = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Weights of size 1 after a few steps of an optimizer, absolute: the same operations on the same
elements, in other places."""
