"""Mixtures of experts: experts sharded over the ranks of a stage, tokens sent to them, and losses
that balance their load."""

from lightning_3d.parallel.expert.dispatch import DispatchedExperts, ExpertParallel, TokenCut
from lightning_3d.parallel.expert.experts import choose_products, expert_specs, shard_experts
from lightning_3d.parallel.expert.overlap import overlap_exchange
from lightning_3d.parallel.expert.routers import (
    Routers,
    RouterStatistics,
    RouterSums,
    attend_calls,
    make_routers,
)

__all__ = [
    "DispatchedExperts",
    "ExpertParallel",
    "RouterStatistics",
    "RouterSums",
    "Routers",
    "TokenCut",
    "attend_calls",
    "choose_products",
    "shard_experts",
    "expert_specs",
    "make_routers",
    "overlap_exchange",
]
