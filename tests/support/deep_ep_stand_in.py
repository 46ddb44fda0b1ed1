"""A module that does what `deep_ep` does, over gloo, on tensors of any type on the CPU.

Signatures, shapes, types and meaning are those of `deep_ep.Buffer` in DeepEP 1.2.1 (`deep_ep/buffer.py`, MIT licence) and of
`deep_ep.buffers.legacy.Buffer` in 2.1.0, compared by eye. Unlike there, weights have the type of the hidden states where that is wider
than float32. What is sent with `async_finish` arrives when its event is waited for, and is not a number before.
"""

import contextlib
import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

LOG: list[str] = []
"""Calls, and arrivals, in this process."""


class Config:
    """Sizes of buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 128 * hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        raise RuntimeError("NVSHMEM is disable during compilation")  # as DeepEP built without it says, also within a node


class EventOverlap:
    """The end of a call."""

    def __init__(self, event: Callable[[], None] | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event()
        LOG.append("arrived")


class Buffer:
    """Sends rows between the ranks of a group."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        self.group, self.group_size, self.rank = group, group.size(), group.rank()
        assert num_nvl_bytes > 0 and (num_rdma_bytes == 0) == (self.group_size <= 8)
        LOG.append("buffer")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64 and topk_idx.ndim == 2 and topk_idx.is_contiguous()
        assert bool((topk_idx < num_experts).all())
        experts = (topk_idx.unsqueeze(-1) == torch.arange(num_experts)).any(1)  # (n, experts)
        ranks = experts.view(len(topk_idx), self.group_size, num_experts // self.group_size).any(-1)
        return ranks.sum(0, dtype=torch.int32), None, experts.sum(0, dtype=torch.int32), ranks, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        assert x.ndim == 2 and x.is_contiguous()
        LOG.append("dispatch")
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            rows, sent, received, tokens = handle
            assert len(x) == tokens
            found, event = self._send(x[rows], sent, received, async_finish)
            return found, None, None, None, None, event
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None and is_token_in_rank is not None
        assert topk_idx is not None and topk_weights is not None and topk_weights.shape == topk_idx.shape
        assert topk_weights.dtype == torch.promote_types(x.dtype, torch.float32) and topk_weights.is_contiguous()
        assert len(x) == len(topk_idx) == len(is_token_in_rank) and num_tokens_per_expert.dtype == torch.int32
        local = len(num_tokens_per_expert) // self.group_size
        rows, sent = is_token_in_rank.T.nonzero()[:, 1], num_tokens_per_rank.tolist()
        counts = self._exchange_counts(torch.cat([num_tokens_per_rank.unsqueeze(1), num_tokens_per_expert.view(-1, local)], 1))
        received = counts[:, 0].tolist()
        to = torch.arange(self.group_size).repeat_interleave(num_tokens_per_rank.long()).unsqueeze(1)
        here = topk_idx[rows] - to * local
        elsewhere = (here < 0) | (here >= local) | (topk_idx[rows] < 0)
        chosen, _ = self._send(here.masked_fill(elsewhere, -1), sent, received, False)
        found, event = self._send(x[rows], sent, received, async_finish)
        weights, weights_event = self._send(topk_weights[rows].masked_fill(elsewhere, 0.0), sent, received, async_finish)
        handle = rows, sent, received, len(x)
        return found, chosen, weights, counts[:, 1:].sum(0).tolist(), handle, _both(event, weights_event)

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        LOG.append("combine")
        assert x.ndim == 2 and x.is_contiguous() and len(x) == sum(handle[2])
        found, event = self._add_up(x, handle, async_finish)
        if topk_weights is None:
            return found, None, event
        assert topk_weights.is_contiguous() and len(topk_weights) == len(x)
        weights, weights_event = self._add_up(topk_weights, handle, async_finish)
        return found, weights, _both(event, weights_event)

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        found = torch.empty_like(counts)
        dist.all_to_all_single(found, counts.contiguous(), group=self.group)
        return found

    def _send(self, x: Tensor, sent: list[int], received: list[int], later: bool) -> tuple[Tensor, EventOverlap]:
        """Rows that arrive when the event is waited for, or now."""
        arriving = x.new_empty((sum(received), *x.shape[1:]))
        work = dist.all_to_all_single(arriving, x.contiguous(), received, sent, group=self.group, async_op=True)
        return self._when(work, arriving.shape, arriving, lambda: arriving, later)

    def _add_up(self, x: Tensor, handle: Any, later: bool) -> tuple[Tensor, EventOverlap]:
        """Sums of the rows of each token, in float32 or wider."""
        rows, sent, received, tokens = handle
        arriving = x.new_empty((len(rows), *x.shape[1:]))
        work = dist.all_to_all_single(arriving, x, sent, received, group=self.group, async_op=True)
        wide = torch.promote_types(x.dtype, torch.float32)

        def add() -> Tensor:
            total = torch.zeros((tokens, *x.shape[1:]), dtype=wide)
            return total.index_add_(0, rows, arriving.to(wide)).to(x.dtype)

        return self._when(work, (tokens, *x.shape[1:]), x, add, later)

    @staticmethod
    def _when(work: Any, shape: Any, like: Tensor, find: Callable[[], Tensor], later: bool) -> tuple[Tensor, EventOverlap]:
        if not later:
            work.wait()
            return find(), EventOverlap()
        result = torch.full(tuple(shape), torch.nan, dtype=like.dtype)

        def finish() -> None:
            work.wait()
            with torch.no_grad():
                result.detach().copy_(find())

        return result, EventOverlap(finish)


def _both(*events: EventOverlap) -> EventOverlap:
    """One event for several."""
    waits = [event.event for event in events if event.event is not None]
    return EventOverlap(lambda: [wait() for wait in waits] and None) if waits else EventOverlap()


def make_module(**replaced: Any) -> ModuleType:
    """Make a module `deep_ep`, with other attributes where they are given."""
    module = ModuleType("deep_ep")
    module.__spec__ = importlib.machinery.ModuleSpec("deep_ep", None)
    vars(module).update({"Buffer": Buffer, "Config": Config, "__version__": "1.2.1"} | replaced)
    return module


@contextlib.contextmanager
def deep_ep_stand_in() -> Iterator[None]:
    """Let `deep_ep` be this module, and let runs on CPU and in other types than bf16 use it."""
    from lightning_3d.config.options.experts import ExpertOptions

    with patch.dict(sys.modules, {"deep_ep": make_module()}), patch.object(ExpertOptions, "check_run", lambda *args: None):
        yield
    LOG.clear()
