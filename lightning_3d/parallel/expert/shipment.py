"""Rows that go to several ranks, and the way back of what these ranks make of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel.expert.exchange import Exchange, exchange


@dataclass(frozen=True)
class Shipment:
    """Pairs (row, destination) of which some are sent to the ranks of a group.

    Attributes:
        group: the ranks.
        order: numbers of the pairs that are sent, in the order of the ranks.
        pairs: number of all pairs.
        sent: pairs that go to each rank.
        received: pairs that come from each rank.
    """

    group: dist.ProcessGroup
    order: Tensor
    pairs: int
    sent: list[int]
    received: list[int]

    def start(self, rows: Tensor) -> Exchange:
        """Start to send `rows`, one for each number in `order`."""
        return Exchange(rows, self.group, self.sent, self.received)

    def bring_back(self, results: Tensor) -> Tensor:
        """Return the results (pairs, ...) of all pairs in the order of their numbers; zeros for
        those that were not sent.

        Args:
            results: what this rank made of the rows that it received.
        """
        returned, total = exchange(results, self.group, self.received, self.sent), sum(self.sent)
        if total < self.pairs:
            returned = torch.cat([returned, returned.new_zeros(1, *returned.shape[1:])])
        place = torch.full((self.pairs,), total, dtype=self.order.dtype, device=self.order.device)
        place[self.order] = torch.arange(total, dtype=self.order.dtype, device=self.order.device)
        return returned[place]


def even_parts(total: int, parts: int) -> list[int]:
    """Split a number into equal parts; the first ones are larger by one if it is not divisible."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def local_experts(counts: Tensor, rows: int) -> Tensor:
    """Expert of each of the rows that arrive, counted on this rank.

    Args:
        counts: rows for each expert of this rank from each rank (ranks, experts).
        rows: number of all rows.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return experts.repeat_interleave(counts.reshape(-1), output_size=rows)


def weighted_sum(results: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the results (n * k, hidden) of the k experts of each token with their weights (n, k)."""
    return (
        (results.view(*weights.shape, results.shape[-1]) * weights.unsqueeze(-1)).sum(1).to(dtype)
    )
