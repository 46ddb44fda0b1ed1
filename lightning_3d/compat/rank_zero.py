"""Warnings and prints of rank 0 alone, as Lightning's, which are those of its package
`lightning_utilities`.

Importing them from there does not import Lightning, which takes seconds. Lightning sets
`rank_zero_only.rank` when it is imported; what has not imported it finds the rank here, in the same
variables. The names are public; `rank_zero_only.rank` is an attribute of a function.
"""

from __future__ import annotations

import os

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

__all__ = ["rank_zero_info", "rank_zero_only", "rank_zero_warn", "set_rank"]

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")


def set_rank(rank: int) -> None:
    """Set the rank of this process, once its process group knows it."""
    vars(rank_zero_only)["rank"] = rank


if getattr(rank_zero_only, "rank", None) is None:
    set_rank(next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0))
