"""Private PyTorch APIs of tensors without values (`FakeTensorMode`) and of process groups that send
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Collective:
    """One call of a collective, or of a message between two ranks, on this rank.

    Attributes:
        name: name of the function of `torch.distributed`.
        ranks: global ranks of the group.
        bytes: bytes that this rank sends; for `recv`, receives.
    """

    name: str
    ranks: tuple[int, ...]
    bytes: int


# operator: function, position of the argument with this rank's tensors, position of the group
_COLLECTIVES = {
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
_FUNCTIONAL = {  # operator: function, position of the group's name
    "all_reduce": ("all_reduce", 2),
    "all_gather_into_tensor": ("all_gather_into_tensor", 2),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", 3),
}


def collective_of(func: Any, args: tuple[Any, ...]) -> Collective | None:
    """Describe what a `c10d` or `_c10d_functional` operator (torch 2.11 to 2.13) communicates; None
    for other operators."""
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
    return Collective(
        called, ranks, sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    )


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Count the operations of a matrix product or an attention; 0 for anything else
    (`torch.utils.flop_counter`, 2.11 to 2.13)."""
    count = _flop_formulas().get(func.overloadpacket)
    return int(count(*args, **kwargs, out_val=result)) if count is not None else 0


@cache
def _flop_formulas() -> dict[Any, Any]:
    """Formulas of torch, and of its CPU attention and grouped products, for which it has none."""
    import torch
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query.shape, key.shape, value.shape)

    def attention_backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> int:
        return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)

    def grouped(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
        """Multiply every row of a two-dimensional factor once, in whichever group it is."""
        rows = left if left.ndim == 2 else right
        other = right if left.ndim == 2 else left
        return 2 * rows.numel() * (other.shape[-1] if left.ndim == 2 else other.shape[-2])

    found = dict(flop_registry)
    aten = torch.ops.aten
    found[aten._scaled_dot_product_flash_attention_for_cpu] = attention
    found[aten._scaled_dot_product_flash_attention_for_cpu_backward] = attention_backward
    found[aten._grouped_mm] = grouped
    return found


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Compute attention with the memory-efficient kernel of GPUs, also of fake tensors on the CPU.

    `aten::_scaled_dot_product_efficient_attention` (torch 2.11 to 2.13). As in
    `scaled_dot_product_attention`, whose arguments these are, a mask of flags becomes a bias for
    each head.
    """
    import torch

    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill(~bias, float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    attended: Tensor = kernel(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]
    return attended


def fake_mode() -> Any:
    """A mode in which operations compute shapes instead of values
    (`torch._subclasses.FakeTensorMode`, torch 2.11 to 2.13)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@cache
def _fake_tensor() -> type[Tensor]:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape but no values."""
    return isinstance(tensor, _fake_tensor())


def as_fake(tensor: Tensor, mode: Any, device: torch.device) -> Tensor:
    """Make a tensor of a `fake_mode` that reports `device` from a meta tensor; they share the
    storage."""
    return _fake_tensor()(mode, tensor, device)


def device_of_fake(tensor: Tensor) -> torch.device:
    """The device that a fake tensor reports. Reading `.device` would be an operation, which every
    mode sees."""
    return tensor.fake_device  # type: ignore[attr-defined]


def can_be_remembered(func: Any) -> bool:
    """Return whether an operator's results have shapes and offsets that depend only on the shapes
    of its arguments, and the arguments do not change.

    The tags of operators (`torch.Tag`, torch 2.11 to 2.13) say so.
    """
    import torch

    other = {
        torch.Tag.inplace_view,
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
    }
    return (
        func.namespace == "aten"
        and not other & set(func.tags)
        and not func._opname.startswith("as_strided")
    )


@cache
def data_dependent_errors() -> tuple[type[Exception], ...]:
    """Exceptions that a fake operation raises where its result depends on values (torch 2.11 to
    2.13; not public)."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )

    return (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


FAKE_GLOO = "fake_gloo"
"""Name of the backend that replaces gloo in a dry run; "fake" replaces NCCL."""


def fake_backend(gloo: bool) -> tuple[str, Any]:
    """The name of a backend that sends nothing, and its store
    (`torch.testing._internal.distributed.fake_pg`, torch 2.11 to 2.13)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

    if FAKE_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            FAKE_GLOO, _create_fake_pg, extended_api=True, devices=["cpu", "cuda"]
        )
    return (FAKE_GLOO if gloo else dist.Backend.FAKE), FakeStore()
