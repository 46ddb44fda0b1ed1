"""Everything of torch that is not public, beside what `lightning_compat` has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
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
    from lightning_3d import exchange

    if exchange.fits(part, group):
        return exchange.all_gather(whole, part, group)
    return all_gather_by_name(whole, part, group)


def all_gather_by_name(whole: Tensor, part: Tensor, group: ProcessGroup) -> Work:
    """`all_gather_flat` by the collective of that name, whatever the backend, as DeepSpeed calls it."""
    import torch.distributed as dist

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


@dataclass(frozen=True)
class Collective:
    """One call of a collective, or of a message between two ranks, on this rank.

    Attributes:
        name: of the function of `torch.distributed`. ranks: global ones of the group. bytes: that this rank puts in; with `recv`, gets.
    """

    name: str
    ranks: tuple[int, ...]
    bytes: int


_COLLECTIVES = {  # name of the operator: name of the function, which argument holds what this rank puts in, and which the group
    "allreduce_": ("all_reduce", 0, 1),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "_allgather_base_": ("all_gather_into_tensor", 1, 2),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1, 2),
    "allgather_": ("all_gather", 1, 2),
    "alltoall_base_": ("all_to_all_single", 1, 2),
    "send": ("send", 0, 1),
    "recv_": ("recv", 0, 1),
}
_FUNCTIONAL = {  # which argument holds the name of the group
    "all_reduce": ("all_reduce", 2),
    "all_gather_into_tensor": ("all_gather_into_tensor", 2),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", 3),
}


def collective_of(func: Any, args: tuple[Any, ...]) -> Collective | None:
    """What an operator communicates; None where it does not: `c10d` and `_c10d_functional` operators (torch 2.11 to 2.13)."""
    namespace = func.namespace
    if namespace not in ("c10d", "_c10d_functional"):
        return None
    import torch
    import torch.distributed as dist

    name = func._opname
    if namespace == "c10d" and name in _COLLECTIVES:
        called, place, group_place = _COLLECTIVES[name]
        group = dist.ProcessGroup.unbox(args[group_place])
    elif namespace == "_c10d_functional" and name in _FUNCTIONAL:
        called, group_place = _FUNCTIONAL[name]
        place, group = 0, torch._C._distributed_c10d._resolve_process_group(args[group_place])
    else:
        return None
    tensors = args[place] if isinstance(args[place], (list, tuple)) else [args[place]]
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    return Collective(called, ranks, sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Operations of a matrix product or an attention; 0 for anything else (`torch.utils.flop_counter`, 2.11 to 2.13)."""
    count = _flop_formulas().get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


@cache
def _flop_formulas() -> dict[Any, Any]:
    """Those of torch, and of its attention on CPU and its grouped products, which it has none for."""
    import torch
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query.shape, key.shape, value.shape)

    def attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
        return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)

    def grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
        """Every row of a two-dimensional factor is multiplied once, whichever group it is in."""
        rows = left if left.ndim == 2 else right
        other = right if left.ndim == 2 else left
        return 2 * rows.numel() * (other.shape[-1] if left.ndim == 2 else other.shape[-2])

    found = dict(flop_registry)
    aten = torch.ops.aten
    found[aten._scaled_dot_product_flash_attention_for_cpu] = attention
    found[aten._scaled_dot_product_flash_attention_for_cpu_backward] = attention_backward
    found[aten._grouped_mm] = grouped
    return found


def fake_mode() -> Any:
    """Under it operations compute shapes instead of values: `torch._subclasses.FakeTensorMode` (torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_values() -> AbstractContextManager[Any]:
    """Inside `fake_mode` operations compute values again: `torch._subclasses.fake_tensor.unset_fake_temporarily` (torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


@cache
def _fake_tensor() -> type[Tensor]:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    return isinstance(tensor, _fake_tensor())


def as_fake(tensor: Tensor, mode: Any, device: torch.device) -> Tensor:
    """A tensor of a `fake_mode` that is said to be on a device, of one on meta; they share the storage."""
    return _fake_tensor()(mode, tensor, device)


def device_of_fake(tensor: Tensor) -> torch.device:
    """Where a fake tensor is said to be. `.device` is an operation, which every mode sees."""
    return tensor.fake_device  # type: ignore[attr-defined]


def can_be_remembered(func: Any) -> bool:
    """Whether shapes of results, and where views begin, follow from shapes of arguments, which keep theirs (`torch.Tag`, 2.11 to 2.13)."""
    import torch

    other = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return func.namespace == "aten" and not other & set(func.tags) and not func._opname.startswith("as_strided")


@cache
def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What a fake operation raises where its result depends on values (torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException

    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


FAKE_GLOO = "fake_gloo"
"""Name of the backend that stands for gloo in a dry run; "fake" stands for NCCL."""


def fake_backend(gloo: bool) -> tuple[str, Any]:
    """(name of a backend that sends nothing, its store): `torch.testing._internal.distributed.fake_pg` (torch 2.11 to 2.13)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

    if FAKE_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(FAKE_GLOO, _create_fake_pg, extended_api=True, devices=["cpu", "cuda"])
    return (FAKE_GLOO if gloo else dist.Backend.FAKE), FakeStore()


def tensor_pickle(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """What `torch.save` (torch 2.11 to 2.13) pickles of one tensor, beside whose elements it stands: they are in the storage "0".

    `torch.save` makes it on the way to writing the elements only.
    """
    import io
    import pickle

    import torch

    class Pickler(pickle.Pickler):
        def persistent_id(self, thing: Any) -> Any:
            if isinstance(thing, torch.storage.TypedStorage):
                return ("storage", getattr(torch, thing._pickle_storage_type()), "0", "cpu", thing._size())
            if isinstance(thing, torch.UntypedStorage):
                return ("storage", torch.UntypedStorage, "0", "cpu", thing.nbytes())
            return None

    contents = io.BytesIO()
    Pickler(contents, protocol=2).dump(torch.empty(shape, dtype=dtype, device="cpu"))
    return contents.getvalue()
