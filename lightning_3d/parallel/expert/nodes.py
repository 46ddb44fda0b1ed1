"""Dispatch of tokens over two tiers of a network: a token crosses once to each node on which it has
experts, not once for each expert.

A rank sends a token, with its experts and their weights, to the rank in its own place on each of
these nodes. That rank sends it on to the experts of its node, sums their weighted outputs, and
returns one row. All links between nodes thus connect ranks with the same place (DeepEP, and
DeepSeek-V3, arXiv:2412.19437, section 3.2.2). Gradients travel the same way in the other direction.

Outputs of experts on one node are summed there, so the order of a sum differs from that of direct
dispatch. In 16 bits the sum of a node is rounded before it crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.expert.exchange import Exchange
from lightning_3d.parallel.expert.shipment import Shipment, even_parts, local_experts, weighted_sum
from lightning_3d.parallel.mesh import ExpertNodes


@dataclass(frozen=True)
class _Counts:
    """Rows that this rank sends and receives, for each rank of the two groups; and its experts'
    pairs from each rank of its node."""

    across: tuple[list[int], list[int]]
    within: tuple[list[int], list[int]]
    experts: Tensor


class NodeDispatch:
    """Tokens on their way to the nodes that have their experts.

    Args:
        hidden: tokens (n, hidden).
        chosen: experts of each token (n, k); `experts` for a pair that is not sent.
        weights: weights of these experts (n, k).
        nodes: the nodes.
        experts: number of all experts.
        balanced: whether to assume equal numbers of rows, for tokens without values.
    """

    def __init__(
        self,
        hidden: Tensor,
        chosen: Tensor,
        weights: Tensor,
        nodes: ExpertNodes,
        experts: int,
        *,
        balanced: bool = False,
    ) -> None:
        self._rows = rows = len(hidden)
        self._nodes, self._per_node = nodes, experts // nodes.nodes
        goes = torch.zeros((rows, nodes.nodes + 1), dtype=torch.bool, device=chosen.device)
        goes = goes.scatter_(1, chosen // self._per_node, True)[:, : nodes.nodes].T  # (nodes, rows)
        self._counts = self._exchange_counts(goes.sum(1), chosen, experts, balanced)
        sent, received = self._counts.across
        # a number is node * rows + row
        order = torch.sort((~goes).reshape(-1).byte(), stable=True).indices[: sum(sent)]
        self._across = Shipment(nodes.across, order, rows * nodes.nodes, sent, received)
        self._exchanges: list[Exchange] = [
            self._across.start(x[order % max(rows, 1)]) for x in (hidden, chosen, weights)
        ]

    @property
    def under_way(self) -> list[Tensor]:
        """The tensors of the start that `finish` uses."""
        return [exchange.arriving for exchange in self._exchanges]

    @under_way.setter
    def under_way(self, tensors: list[Tensor]) -> None:
        for exchange, tensor in zip(self._exchanges, tensors, strict=True):
            exchange.arriving = tensor

    def _exchange_counts(
        self, rows: Tensor, chosen: Tensor, experts: int, balanced: bool
    ) -> _Counts:
        """Two small all-to-all, one over each group; the host waits once.

        Args:
            rows: rows for each node.
        """
        nodes, size = self._nodes, dist.get_world_size(self._nodes.within)
        rising = chosen.reshape(-1).sort().values
        pairs = torch.searchsorted(rising, torch.arange(experts + 1, device=chosen.device)).diff()
        mine = torch.cat([rows.unsqueeze(1), pairs.view(nodes.nodes, -1)], 1)
        theirs = torch.empty_like(mine)
        gloo_exchange.all_to_all(theirs, mine, None, None, nodes.across)
        # pairs that this rank sends on, for each expert of its node
        forwarded = theirs[:, 1:].sum(0)
        arriving = forwarded
        if size > 1:
            arriving = torch.empty_like(forwarded)
            gloo_exchange.all_to_all(arriving, forwarded, None, None, nodes.within)
        experts_here = arriving.view(size, -1)
        if balanced:
            across = even_parts(len(chosen) * min(chosen.shape[1], nodes.nodes), nodes.nodes)
            within = even_parts(chosen.numel(), size)
            return _Counts((across, across), (within, within), experts_here)
        numbers = torch.cat(
            [rows, theirs[:, 0], forwarded.view(size, -1).sum(1), experts_here.sum(1)]
        ).tolist()
        over, here = numbers[: 2 * nodes.nodes], numbers[2 * nodes.nodes :]
        return _Counts(
            (over[: nodes.nodes], over[nodes.nodes :]), (here[:size], here[size:]), experts_here
        )

    def finish(self, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Wait for the tokens, `run` this rank's experts on those of its node, and return the
        outputs (n, hidden) of the tokens that were sent."""
        hidden, chosen, weights = (exchange.wait() for exchange in self._exchanges)
        local = chosen - self._nodes.node * self._per_node
        elsewhere = (local < 0) | (local >= self._per_node)
        order = torch.sort(
            local.masked_fill(elsewhere, self._per_node).reshape(-1), stable=True
        ).indices
        sent, received = self._counts.within
        within = Shipment(self._nodes.within, order[: sum(sent)], chosen.numel(), sent, received)
        arrived = within.start(hidden[within.order // chosen.shape[1]]).wait()
        results = run(arrived, local_experts(self._counts.experts, sum(received)))
        summed = weighted_sum(within.bring_back(results), weights, hidden.dtype)
        return (
            self._across.bring_back(summed)
            .view(self._nodes.nodes, self._rows, hidden.shape[-1])
            .sum(0)
        )

    def discard(self) -> None:
        """Wait for the tokens and drop them."""
        for exchange in self._exchanges:
            exchange.wait()
