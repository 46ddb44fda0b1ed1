"""Dispatch of tokens to the ranks that have their experts, and back.

Each pair (token, expert) travels once there and once back, forward and backward: two all-to-all of
the hidden states in each direction of a layer. Before the first one the ranks exchange how many
tokens they send, in an all-to-all of as many numbers as there are experts; reading the result is
the only time that the host waits for the device. No pair is dropped because an expert is full, so
the output is that of one process. (GShard, arXiv:2006.16668, but without its capacity limit, as in
MegaBlocks, arXiv:2211.15841.)

Where the ranks are on several nodes, `nodes` sends a token only once to each node. What a block
computes beside its experts can run while tokens travel: see `overlap`. In the graph of a compiled
block all this is two operators: see `expert_operators`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel import gloo_exchange
from lightning_3d.parallel.expert.expert_operators import BegunInGraph, register
from lightning_3d.parallel.expert.nodes import NodeDispatch
from lightning_3d.parallel.expert.shipment import Shipment, even_parts, local_experts, weighted_sum
from lightning_3d.parallel.mesh import ExpertNodes
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
        index: this rank's place in the group; it has the experts index * experts / size and
            following.
        tokens: split of the tokens, which tensor-parallel ranks hold alike, over these ranks; None
            without tensor parallelism.
        nodes: nodes that these ranks are on, if a token is sent only once to each node; None to
            send it to each of its experts.
        balanced: whether to assume that all ranks send and receive equally many tokens, instead of
            asking the routers. Used in dry runs, where routers have no values.
    """

    group: dist.ProcessGroup
    size: int
    index: int
    tokens: TokenCut | None = None
    nodes: ExpertNodes | None = None
    balanced: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        """A copied model (weight averaging) talks to the same ranks."""
        return self


@dataclass
class _Begun:
    """A call whose tokens are under way."""

    arguments: tuple[Tensor, Tensor, Tensor]
    dispatch: _Dispatch | NodeDispatch

    def is_of(self, *arguments: Tensor) -> bool:
        return all(now is then for now, then in zip(arguments, self.arguments, strict=True))


class DispatchedExperts:
    """Mixin for a module of experts, some on each rank: runs them, by the module's own forward, on
    the tokens of all ranks.

    Called with tokens (n, hidden), or (rows, sequence, hidden), the experts of each (n, k), counted
    over all ranks, and their weights (n, k); n may differ between ranks and may be 0. All ranks of
    the group call it equally often.

    Attributes:
        place: its name in operators, see `expert_operators`.
        draws: whether the experts draw random numbers. The graph of a compiled block then ends at
            them: an operator would draw others.
        begun_in_graph: a call that the graph under construction has started.
    """

    expert_parallel: ExpertParallel
    experts_of_all: int
    place: Tensor
    draws: bool
    drops: Callable[[], bool] | None = None
    """True if a weight of exactly 0 means that the pair was dropped and is not sent; None means
    no."""
    begun: _Begun | None = None
    begun_in_graph: BegunInGraph | None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied module has a name of its own."""
        super().__setstate__(state)  # type: ignore[misc]
        self.place = register(self)

    def begin(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        """Start to send the tokens of the next call. What runs before that call runs while they
        travel.

        If that call has other arguments, which all ranks must agree on, the tokens that were sent
        are discarded and others are sent.
        """
        if torch.compiler.is_compiling() and not self.draws:
            self.begun_in_graph = BegunInGraph(
                self.place, hidden_states, top_k_index, top_k_weights
            )
        else:
            self._begin(hidden_states, top_k_index, top_k_weights)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and not self.draws:
            return self._in_graph(hidden_states, top_k_index, top_k_weights)
        return self._call(hidden_states, top_k_index, top_k_weights)

    def _in_graph(self, *arguments: Tensor) -> Tensor:
        begun, self.begun_in_graph = self.begun_in_graph, None
        # a start that nothing uses is not in the graph
        if begun is None or not begun.is_of(*arguments):
            begun = BegunInGraph(self.place, *arguments)
        assert isinstance(self, nn.Module)
        return begun.finish(
            [parameter for parameter in self.parameters() if parameter.requires_grad]
        )

    @torch.compiler.disable
    def _begin(self, *arguments: Tensor) -> None:
        if self.begun is not None:
            self.begun.dispatch.discard()  # a recomputation ended before the call
        self.begun = self.start(*arguments)

    @torch.compiler.disable
    def _call(self, *arguments: Tensor) -> Tensor:
        begun, self.begun = self.begun, None
        if begun is not None and not begun.is_of(*arguments):
            begun.dispatch.discard()  # a hook has changed the arguments since
            begun = None
        return self.finish(self.start(*arguments) if begun is None else begun)

    def start(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> _Begun:
        """Start to send the tokens of a call."""
        parts = [hidden_states.reshape(-1, hidden_states.shape[-1]), top_k_index, top_k_weights]
        if (tokens := self.expert_parallel.tokens) is not None:
            parts = [tokens.cut(part) for part in parts]
        hidden, chosen, weights = parts
        if self.drops is not None and self.drops():
            chosen = chosen.masked_fill(weights == 0, self.experts_of_all)
        ranks, experts = self.expert_parallel, self.experts_of_all
        dispatch: _Dispatch | NodeDispatch
        if ranks.nodes is None:
            dispatch = _Dispatch(hidden, chosen, weights, ranks, experts)
        else:
            dispatch = NodeDispatch(
                hidden, chosen, weights, ranks.nodes, experts, balanced=ranks.balanced
            )
        return _Begun((hidden_states, top_k_index, top_k_weights), dispatch)

    def finish(self, begun: _Begun) -> Tensor:
        """Run the experts on the tokens that arrive, and return the output of a call, of the shape
        of its tokens."""
        hidden_states, _, _ = begun.arguments
        output, tokens = begun.dispatch.finish(self._experts), self.expert_parallel.tokens
        if tokens is not None:
            output = tokens.join(output, hidden_states.numel() // hidden_states.shape[-1])
        return output.view(hidden_states.shape)

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


class _Dispatch:
    """Tokens on their way, one row for each of their experts, straight to the ranks that have these
    experts.

    Args:
        hidden: tokens (n, hidden).
        chosen: experts of each token (n, k); `experts` for a pair that is not sent.
        weights: weights of these experts (n, k).
        ranks: ranks that have the experts.
        experts: number of all experts.
    """

    def __init__(
        self, hidden: Tensor, chosen: Tensor, weights: Tensor, ranks: ExpertParallel, experts: int
    ) -> None:
        rising, order = torch.sort(chosen.reshape(-1), stable=True)
        sent, received, self._experts = self._exchange_counts(rising, ranks, experts)
        self._shipment = Shipment(ranks.group, order[: sum(sent)], chosen.numel(), sent, received)
        self._weights, self._dtype = weights, hidden.dtype
        self._exchange = self._shipment.start(hidden[self._shipment.order // chosen.shape[1]])

    @staticmethod
    def _exchange_counts(
        rising: Tensor, ranks: ExpertParallel, experts: int
    ) -> tuple[list[int], list[int], Tensor]:
        """(rows that go to each rank, rows that come from each, the expert of each row that comes,
        counted on this rank)."""
        counts = torch.searchsorted(rising, torch.arange(experts + 1, device=rising.device)).diff()
        others = torch.empty_like(counts)
        gloo_exchange.all_to_all(others, counts, None, None, ranks.group)
        if ranks.balanced:
            sent = received = even_parts(len(rising), ranks.size)
        else:
            sent, received = torch.stack([counts, others]).view(2, ranks.size, -1).sum(-1).tolist()
        return sent, received, local_experts(others.view(ranks.size, -1), sum(received))

    @property
    def under_way(self) -> list[Tensor]:
        """The tensors of the start that `finish` uses."""
        return [self._exchange.arriving, self._weights]

    @under_way.setter
    def under_way(self, tensors: list[Tensor]) -> None:
        self._exchange.arriving, self._weights = tensors

    def finish(self, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Wait for the tokens, `run` this rank's experts on them, and return the outputs (n,
        hidden) of the tokens that were sent."""
        results = run(self._exchange.wait(), self._experts)
        return weighted_sum(self._shipment.bring_back(results), self._weights, self._dtype)

    def discard(self) -> None:
        """Wait for the tokens and drop them: their memory must not be freed while they travel."""
        self._exchange.wait()


class _Unused(torch.autograd.Function):
    """Stands for experts without tokens: the backward reaches it on every rank, and the experts'
    gradients are zeros, as in one process, where all experts are one tensor."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, *parameters: Tensor) -> Tensor:
        ctx.made_like = [
            (parameter.shape, parameter.dtype, parameter.device) for parameter in parameters
        ]
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = zip(ctx.made_like, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in wanted
        )
