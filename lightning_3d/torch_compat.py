"""Everything of torch that is not public, beside what `lightning_compat` has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_functional: ContextVar[bool] = ContextVar("functional", default=False)


@contextmanager
def functional_collectives() -> Iterator[None]:
    """Within it, tensor-parallel sums are operators that return new tensors: a selective recomputation sees and keeps what they return."""
    token = _functional.set(True)
    try:
        yield
    finally:
        _functional.reset(token)


def collectives_are_functional() -> bool:
    """Whether `functional_collectives` holds."""
    return _functional.get()


def functional_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of `x`, contiguous, over a group in new memory, as an operator that compilers and checkpoints see (`_c10d_functional`)."""
    import torch

    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_reduce(x, "sum", group.group_name))


def functional_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks, contiguous, one behind the other along dimension 0, as such an operator."""
    import torch

    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.all_gather_into_tensor(x, group.size(), group.group_name))


def functional_scatter_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part, along dimension 0, of the sum of `x`, contiguous, as such an operator."""
    import torch

    operators = torch.ops._c10d_functional
    return operators.wait_tensor(operators.reduce_scatter_tensor(x, "sum", group.size(), group.group_name))


def kept_collectives() -> frozenset[Any]:
    """The operators that sum, whose results a selective recomputation keeps instead of communicating again."""
    import torch

    operators = torch.ops._c10d_functional
    return frozenset({operators.all_reduce.default, operators.reduce_scatter_tensor.default, operators.wait_tensor.default})


_recomputed: ContextVar[bool] = ContextVar("recomputed", default=False)


@contextmanager
def recomputed() -> Iterator[None]:
    """Around what the backward will run again, then too."""
    token = _recomputed.set(True)
    try:
        yield
    finally:
        _recomputed.reset(token)


def is_recomputed() -> bool:
    """Whether what runs now is run again by the backward, so that what it saves is short-lived."""
    return _recomputed.get()


def graph_breaks() -> Counter[str]:
    """By reason: how often Dynamo ended a graph inside a function in this process (`torch._dynamo.utils.counters`, 2.11 to 2.13)."""
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


def compiled_graphs() -> int:
    """How many graphs Dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def uncompiled_frames() -> int:
    """How many functions Dynamo was asked to compile and did not: beyond its limit of variants, for example."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"] - counters["frames"]["ok"])


def allow_graphs(variants: int) -> None:
    """Let one function be compiled for so many kinds of arguments (`torch._dynamo.config.recompile_limit`, 8 by default)."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, variants)


def allow_second_backward() -> None:
    """Let the backward of a compiled function run twice, as schedules with a split backward do.

    By default it gives the memory of what was saved to its own results (`torch._functorch.config.donated_buffer`, 2.11 to 2.13).
    """
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False


def all_reduce_flat(x: Tensor, group: ProcessGroup | None, op: Any = None) -> None:
    """Replace `x`, contiguous, by its sum over the group, or what another operation makes of it."""
    import torch.distributed as dist

    from lightning_3d import exchange

    op = dist.ReduceOp.SUM if op is None else op
    if exchange.fits_whole(x, group):
        exchange.all_reduce(x, group, op)
    else:
        dist.all_reduce(x, op, group)


def all_gather_flat(whole: Tensor, part: Tensor, group: ProcessGroup) -> Work:
    """Start to collect the parts of all ranks, equal in size, one behind the other. Returns the work to wait for.

    torch 2.13 renamed `all_gather_into_tensor` to `all_gather_single`; the old name warns.
    """
    import torch.distributed as dist

    from lightning_3d import exchange

    if exchange.fits(part, group):
        return exchange.all_gather(whole, part, group)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(whole, part, group=group, async_op=True)


def reduce_scatter_flat(part: Tensor, whole: Tensor, group: ProcessGroup) -> Work:
    """Start to sum `whole` over the ranks and to leave each its part. Returns the work to wait for.

    torch 2.13 renamed `reduce_scatter_tensor` to `reduce_scatter_single`; the old name warns.
    """
    import torch.distributed as dist

    from lightning_3d import exchange

    if exchange.fits(whole, group):
        return exchange.reduce_scatter(part, whole, group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(part, whole, group=group, async_op=True)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(out, log of the sum of exponentials in float32) of CUDA's flash attention.

    `aten::_scaled_dot_product_flash_attention`, 2.11 to 2.13.

    Args:
        query: (batch, heads, queries, width); key, value: with as many heads, or a divisor of them.
    """
    import torch

    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return out, lse


def flash_attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a block's queries, keys and values, where `out` and `lse`, contiguous, are those of the queries with all keys.

    The state of dropout, which there is none of, is not read (`aten::_scaled_dot_product_flash_attention_backward`, 2.11 to 2.13).
    """
    import torch

    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))  # as the forward returns them
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = (query.shape[2], key.shape[2])
    return backward(grad_out, query, key, value, out, lse, None, None, *lengths, 0.0, causal, seed, offset, scale=scale)
