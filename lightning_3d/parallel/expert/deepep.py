"""Dispatch of tokens by DeepEP: a token goes once to each rank on which it has experts, and one row comes back from each.

`Buffer.dispatch` brings the token, its experts and their weights; `Buffer.combine` adds up, for each token, the rows of the ranks that had
it. So a rank copies a token for each of its experts there, and adds up their weighted outputs before they return. The backward of a
dispatch is a combine of the gradients, and that of a combine a dispatch, both with the handle of the forward (DeepEP, README).

Sums are formed by rank, in float32 if numbers are bf16, and rounded before they travel. So results agree with `dispatch` to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.parallel import witness
from lightning_3d.parallel.expert.deepep_library import DeepEP

_NO_EXPERT = -1
"""DeepEP's number for a choice that is not sent."""


class DeepEPDispatch:
    """Tokens on their way to the ranks that have their experts.

    Args:
        hidden: tokens (n, hidden).
        chosen: experts of each token (n, k); `experts` for a pair that is not sent.
        weights: weights of these experts (n, k).
        deepep: DeepEP between the ranks that have the experts.
        experts: number of all experts, equally many on each rank.

    Attributes:
        under_way: the tensors of the start that `finish` uses.
    """

    def __init__(self, hidden: Tensor, chosen: Tensor, weights: Tensor, deepep: DeepEP, experts: int) -> None:
        chosen = chosen.to(deepep.index_type).masked_fill(chosen == experts, _NO_EXPERT).contiguous()
        self._trip = _Trip(deepep.buffer(hidden.shape[1], experts, chosen.shape[1]), chosen, experts)
        self.under_way: list[Tensor] = list(_Start.apply(hidden, weights.to(_wide(weights.dtype)), self._trip))

    def finish(self, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Wait for the tokens, `run` this rank's experts on them, and return the outputs (n, hidden) of the tokens that were sent."""
        tokens, weights = _Wait.apply(*self.under_way, self._trip)
        pairs = _Pairs.of(self._trip.arrived, self._trip.counts)
        results = run(_Copy.apply(tokens, pairs), pairs.experts)
        weighted = results * weights.reshape(-1)[pairs.order].unsqueeze(-1)
        return _Combine.apply(_AddUp.apply(weighted, pairs).to(tokens.dtype), self._trip)

    def discard(self) -> None:
        """Wait for the tokens and drop them."""
        _Wait.apply(*self.under_way, self._trip)


@dataclass(frozen=True)
class _Pairs:
    """Pairs (token, expert of this rank) of the tokens that arrived (r, k), in the order of the experts.

    Attributes:
        order: numbers of the pairs; a number is row * k + choice.
        rows: row of the token of each pair.
        experts: expert of each pair, counted on this rank.
        place: places of a token's pairs in that order (r, most that a token can have here); the number of all pairs stands for none.
    """

    order: Tensor
    rows: Tensor
    experts: Tensor
    place: Tensor

    @classmethod
    def of(cls, chosen: Tensor, counts: list[int]) -> _Pairs:
        """Find the pairs. Does not wait for the device.

        Args:
            chosen: experts (r, k) of the tokens, counted on this rank; below 0 for those of other ranks.
            counts: pairs of each expert of this rank.
        """
        total, flat = sum(counts), chosen.reshape(-1).long()
        order = torch.sort(flat.masked_fill(flat < 0, len(counts)), stable=True).indices[:total]
        place = torch.full_like(flat, total)
        place[order] = torch.arange(total, device=flat.device)
        place = place.view(chosen.shape).sort(1).values[:, : len(counts)]  # a token has each expert once
        return cls(order, order // chosen.shape[1], flat[order], place)


def _add_up(values: Tensor, pairs: _Pairs) -> Tensor:
    """Sums (r, hidden) of the `values` (pairs, hidden) of each token, always in the same order."""
    padded = torch.cat([values, values.new_zeros(1, values.shape[1])])
    total = padded[pairs.place[:, 0]].to(_wide(values.dtype))
    for column in pairs.place[:, 1:].T:
        total += padded[column]
    return total.to(values.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which 16-bit numbers are added up, and weights travel."""
    return torch.promote_types(dtype, torch.float32)


class _Copy(torch.autograd.Function):
    """A row for each pair. Backward: the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, pairs: _Pairs) -> Tensor:
        ctx.pairs = pairs
        return tokens[pairs.rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _add_up(gradient, ctx.pairs), None


class _AddUp(torch.autograd.Function):
    """The sum of the pairs of each token. Backward: its gradient for each pair."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, pairs: _Pairs) -> Tensor:
        ctx.pairs = pairs
        return _add_up(values, pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[ctx.pairs.rows], None


class _Trip:
    """Tokens that go to their experts, their outputs that come back, and the gradients of both.

    Args:
        buffer: the `deep_ep.Buffer`.
        chosen: experts of each token (n, k); below 0 for none.
        experts: number of all experts.

    Attributes:
        arrived: experts (r, k) of the tokens that arrived, counted on this rank; below 0 for those of other ranks.
        counts: pairs of each expert of this rank.
    """

    arrived: Tensor
    counts: list[int]

    def __init__(self, buffer: Any, chosen: Tensor, experts: int) -> None:
        self._buffer, self._chosen, self._experts = buffer, chosen, experts
        self._handle: Any = None
        self._under_way: tuple[Any, tuple[Tensor, Tensor], Any] | None = None

    def start(self, hidden: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Start to send tokens. The host waits until it knows how many arrive; the tokens arrive at `wait`."""
        hidden, weights = hidden.contiguous(), weights.contiguous()
        per_rank, per_node, per_expert, goes, _ = self._buffer.get_dispatch_layout(self._chosen, self._experts)
        witness.sent("token dispatch", hidden)
        tokens, self.arrived, arrived_weights, self.counts, self._handle, event = self._buffer.dispatch(
            hidden,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes,
            num_tokens_per_expert=per_expert,
            topk_idx=self._chosen,
            topk_weights=weights,
            async_finish=True,
        )
        self._under_way = event, (tokens, arrived_weights), (hidden, weights)  # what is sent must live until it has arrived
        return tokens, arrived_weights

    def start_back(self, tokens: Tensor, weights: Tensor) -> None:
        """Start to send the gradients of the tokens, and of their weights, back."""
        tokens, weights = tokens.contiguous(), weights.contiguous()
        witness.sent("token combine", tokens)
        found, found_weights, event = self._buffer.combine(tokens, self._handle, topk_weights=weights, async_finish=True)
        self._under_way = event, (found, found_weights), (tokens, weights)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for what was started, and return it."""
        assert self._under_way is not None
        event, arrived, _ = self._under_way
        self._under_way = None
        event.current_stream_wait()
        witness.received("token exchange", arrived[0])
        return arrived

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sums (n, hidden) of the `rows` (r, hidden) of all ranks."""
        rows = rows.contiguous()
        witness.sent("token combine", rows)
        sums, _, _ = self._buffer.combine(rows, self._handle)
        witness.received("token combine", sums)
        return sums

    def dispatch(self, rows: Tensor) -> Tensor:
        """Send the `rows` (n, hidden) where the tokens went; return those that arrive (r, hidden)."""
        rows = rows.contiguous()
        witness.sent("token dispatch", rows)
        arrived = self._buffer.dispatch(rows, handle=self._handle)[0]
        witness.received("token dispatch", arrived)
        return arrived


class _Start(torch.autograd.Function):
    """Begin of the way of tokens; backward it is the end of that of gradients, as in `exchange`."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        return trip.start(hidden, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, weights_gradient: Tensor) -> Any:
        return *ctx.trip.wait(), None  # the arguments are what `_Wait` sent


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        trip.wait()
        return tokens.view_as(tokens), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, weights_gradient: Tensor) -> Any:
        ctx.trip.start_back(gradient, weights_gradient)
        return gradient, weights_gradient, None  # autograd wants gradients of these shapes; `_Start` returns those that have travelled


class _Combine(torch.autograd.Function):
    """The way back of results. Backward: their gradients go where the tokens went."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.combine(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.trip.dispatch(gradient), None
