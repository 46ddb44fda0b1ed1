"""Attention of simulated devices: by plain products, with what the real flash kernels refuse."""

from __future__ import annotations

from typing import Any

import torch

from simulated_cuda.views import access, launch, on_device, on_host

MATH = 0
"""`SDPBackend.MATH`"""


def choose_math(*args: Any, **kwargs: Any) -> int:
    """`scaled_dot_product_attention` of a model is computed by products, which the simulation
    has."""
    return MATH


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float, is_causal: bool) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * scale
    if not is_causal:
        return scores
    # the mask of the flash kernels is aligned to the lower right corner
    rows, columns = scores.shape[-2:]
    return scores.masked_fill(
        ~torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows), float("-inf")
    )


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention. query, key, value: (batch, heads, sequence, head
    size)."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        raise RuntimeError("the input of FlashAttention must have a contiguous last dimension")
    size = query.shape[-1]
    if (
        size % 8
        or size > 256
        or not size == key.shape[-1] == value.shape[-1]
        or query.shape[1] % key.shape[1]
    ):
        raise RuntimeError(
            f"FlashAttention has no kernel for head size {size} with {query.shape[1]} and"
            f" {key.shape[1]} heads"
        )
    launch(
        query.device,
        "flash_attention",
        [access(tensor, write=False) for tensor in (query, key, value)],
    )
    q, k, v = (on_host(tensor).float() for tensor in (query, key, value))
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    scores = _scores(q, k, scale if scale is not None else size**-0.5, is_causal)
    lse = scores.logsumexp(-1)
    out = ((scores - lse.unsqueeze(-1)).exp() @ v).to(query.dtype)
    out = on_device(
        out.transpose(1, 2).contiguous().transpose(1, 2), query.device, "flash_attention"
    )
    nothing = [torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())]
    mask = torch.empty(0, dtype=query.dtype, device=query.device)
    return (
        out,
        on_device(lse, query.device, "flash_attention"),
        None,
        None,
        query.shape[2],
        key.shape[2],
        *nothing,
        mask,
    )


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    if (
        logsumexp.dtype != torch.float32
        or not logsumexp.is_contiguous()
        or tuple(logsumexp.shape) != tuple(query.shape[:3])
    ):
        raise RuntimeError(
            "FlashAttention's backward wants a contiguous float32 logsumexp of (batch, heads,"
            " sequence)"
        )
    if not grad_out.dtype == query.dtype == out.dtype or grad_out.stride(-1) != 1:
        raise RuntimeError(
            "FlashAttention's backward wants a gradient of the output's type with a contiguous last"
            " dimension"
        )
    inputs = (grad_out, query, key, value, out)
    launch(
        query.device,
        "flash_attention_backward",
        [access(tensor, write=False) for tensor in (*inputs, logsumexp)],
    )
    g, q, k, v, o = (on_host(tensor).float() for tensor in inputs)
    groups = q.shape[1] // k.shape[1]
    repeated_k, repeated_v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    factor = scale if scale is not None else q.shape[-1] ** -0.5
    p = (_scores(q, repeated_k, factor, is_causal) - on_host(logsumexp).unsqueeze(-1)).exp()
    ds = p * (g @ repeated_v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True)) * factor
    of_key, of_value = ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g
    of_key, of_value = (
        tensor.unflatten(1, (k.shape[1], groups)).sum(2) for tensor in (of_key, of_value)
    )
    found = (ds @ repeated_k, of_key, of_value)
    return tuple(
        on_device(tensor.to(query.dtype), query.device, "flash_attention_backward")
        for tensor in found
    )
