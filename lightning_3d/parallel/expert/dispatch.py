"""Dispatch of tokens to the ranks that have their experts, and back.

Each pair (token, expert) travels once there and once back, forward and backward: two all-to-all of the hidden states in each direction of a
layer. Before the first one the ranks exchange how many tokens they send, in an all-to-all of as many numbers as there are experts; reading
the result is the only time that the host waits for the device. No pair is dropped because an expert is full, so the output is that of one
process. (GShard, arXiv:2006.16668, but without its capacity limit, as in MegaBlocks, arXiv:2211.15841.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel import witness
from lightning_3d.parallel.uneven_work import uneven_backward, uneven_work


class TokenCut(Protocol):
    """Split of tokens that several ranks hold alike over these ranks, and the gather afterwards."""

    def cut(self, x: Tensor) -> Tensor:
        """This rank's rows."""
        ...

    def join(self, part: Tensor, rows: int) -> Tensor:
        """All `rows` rows."""
        ...


@dataclass
class ExpertParallel:
    """The ranks that share the experts of one stage.

    Attributes:
        group: their process group.
        size: number of ranks.
        index: this rank's place in the group; it has the experts index * experts / size and following.
        tokens: split of the tokens, which tensor-parallel ranks hold alike, over these ranks; None without tensor parallelism.
        balanced: whether to assume that all ranks send and receive equally many tokens, instead of asking the routers. Used in dry runs,
            where routers have no values.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    tokens: TokenCut | None = None
    balanced: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """A copied model (weight averaging) talks to the same ranks."""
        return self


class DispatchedExperts:
    """Mixin for a module of experts, some on each rank: runs them, by the module's own forward, on the tokens of all ranks.

    Called with tokens (n, hidden), or (rows, sequence, hidden), the experts of each (n, k), counted over all ranks, and their weights
    (n, k); n may differ between ranks and may be 0. All ranks of the group call it equally often.
    """

    expert_parallel: ExpertParallel
    experts_of_all: int
    drops: Callable[[], bool] | None = None
    """True if a weight of exactly 0 means that the pair was dropped and is not sent; None means no."""

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        tokens = self.expert_parallel.tokens
        if tokens is None:
            return self._run(flat, top_k_index, top_k_weights).view(hidden_states.shape)
        part = self._run(tokens.cut(flat), tokens.cut(top_k_index), tokens.cut(top_k_weights))
        return tokens.join(part, len(flat)).view(hidden_states.shape)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        group = self.expert_parallel.group
        rows, choices = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        drops = self.drops is not None and self.drops()
        if drops:
            chosen = chosen.masked_fill(top_k_weights.reshape(-1) == 0, self.experts_of_all)
        chosen, order = torch.sort(chosen, stable=True)
        sent, received, local_experts = self._exchange_counts(chosen)
        order = order[: sum(sent)]
        arrived = exchange(hidden_states[order // choices], group, sent, received)
        returned = exchange(self._experts(arrived, local_experts), group, received, sent)
        if drops:
            returned = torch.cat([returned, returned.new_zeros(1, *returned.shape[1:])])
        place = torch.full((rows * choices,), sum(sent), dtype=order.dtype, device=order.device)
        place[order] = torch.arange(sum(sent), dtype=order.dtype, device=order.device)
        outputs = returned[place].view(rows, choices, hidden_states.shape[-1])
        return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)

    def _exchange_counts(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        """(rows that go to each rank, rows that come from each, the expert of each row that comes, counted on this rank).

        Args:
            chosen: experts of the pairs, rising; dropped pairs come last.
        """
        size, local = self.expert_parallel.size, self.experts_of_all // self.expert_parallel.size
        bounds = torch.searchsorted(chosen, torch.arange(self.experts_of_all + 1, device=chosen.device))
        counts = bounds.diff()
        others = torch.empty_like(counts)
        dist.all_to_all_single(others, counts, group=self.expert_parallel.group)
        if self.expert_parallel.balanced:
            sent = received = even_parts(len(chosen), size)
        else:
            sent, received = torch.stack([counts, others]).view(2, size, local).sum(-1).tolist()
        experts = torch.arange(local, device=chosen.device).repeat(size)
        return sent, received, experts.repeat_interleave(others, output_size=sum(received))

    def _experts(self, tokens: Tensor, experts: Tensor) -> Tensor:
        """Output of this rank's experts for tokens (n, hidden)."""
        if len(tokens) == 0:
            assert isinstance(self, nn.Module)
            return _Unused.apply(tokens, *self.parameters())
        ones = torch.ones((len(tokens), 1), dtype=tokens.dtype, device=tokens.device)
        with uneven_work():
            output: Tensor = super().forward(tokens, experts.unsqueeze(-1), ones)  # type: ignore[misc]
        output = output.view(tokens.shape)
        uneven_backward(tokens, output)
        return output


def even_parts(total: int, parts: int) -> list[int]:
    """Split a number into equal parts; the first ones are larger by one if it is not divisible."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def exchange(x: Tensor, group: dist.ProcessGroup, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Rows of `x`, the first `sent[0]` to the first rank of the group and so on -> the `received` rows of all ranks, in their order.

    One all-to-all forward, one backward with the gradients.
    """
    return _Exchange.apply(x, group, list(sent), list(received))


def _all_to_all(x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
    result = x.new_empty((sum(received), *x.shape[1:]))
    x = x.contiguous()
    witness.sent("all-to-all", x)
    dist.all_to_all_single(result, x, received, sent, group=group)
    witness.received("all-to-all", result)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.way_back = (group, received, sent)
        return _all_to_all(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _all_to_all(gradient, *ctx.way_back), None, None, None


class _Unused(torch.autograd.Function):
    """Stands for experts without tokens: the backward reaches it on every rank, and the experts' gradients are zeros, as in one process,
    where all experts are one tensor."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.made_like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = zip(ctx.made_like, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) if needed else None for (shape, dtype, device), needed in wanted)
