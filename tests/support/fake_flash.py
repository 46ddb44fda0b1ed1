"""FlashAttention 2 of Transformers without its package: torch computes it on any device, and waits
where the package waits."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor, nn


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Causal attention within each document; shapes (tokens, heads, width). The lengths must be
    numbers: a tensor is read."""
    assert causal and dropout_p == 0.0 and int(max_seqlen_q) == int(max_seqlen_k)
    places = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu_seqlens_q.long(), places, right=True)
    behind = places[:, None] - places
    mask = (document[:, None] == document) & (behind >= 0)
    if window_size[0] >= 0:
        mask &= behind <= window_size[0]
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True
    )
    return out.squeeze(0).transpose(0, 1)


def varlen_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    s_aux: Tensor | None = None,
) -> Tensor:
    """FlashAttention 3 with sinks: as `flash_attn_varlen_func`, times the share of the scores that
    the sink of a head leaves."""
    places = torch.arange(len(q), device=q.device)
    outs = []
    for begin, end in itertools.pairwise(cu_seqlens_q.tolist()):
        assert end - begin <= max_seqlen_q
        query, key, value = (
            q[begin:end],
            *(x[begin:end].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v)),
        )
        behind = places[: end - begin, None] - places[: end - begin]
        hidden = (behind < 0) | (behind > (window_size[0] if window_size[0] >= 0 else end))
        assert causal and softmax_scale is not None and s_aux is not None
        scores = (torch.einsum("qhd,khd->hqk", query, key) * softmax_scale).masked_fill(
            hidden, -torch.inf
        )
        total = scores.logsumexp(-1)
        shares = (scores - total.unsqueeze(-1)).exp() * torch.sigmoid(
            total - s_aux.unsqueeze(-1)
        ).unsqueeze(-1)
        outs.append(torch.einsum("hqk,khd->qhd", shares, value))
    return torch.cat(outs).contiguous()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Causal attention; shapes (rows, tokens, heads, width)."""
    assert causal and dropout_p == 0.0
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        is_causal=True,
        scale=softmax_scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2)


@contextmanager
def fake_flash(varlen: Callable[..., Tensor] = flash_attn_varlen_func) -> Iterator[None]:
    """Context in which models may use FlashAttention, see `use_flash`. Transformers keeps the
    functions that it finds in its globals."""
    functions = (flash_attn_func, varlen, None, flash._pad_input, flash._unpad_input)
    filled = dict.fromkeys(
        (
            "_flash_fn",
            "_flash_varlen_fn",
            "_flash_with_kvcache_fn",
            "_pad_fn",
            "_unpad_fn",
            "_loaded_implementation",
        )
    )
    with (
        patch.object(flash, "_lazy_imports", lambda *args, **kwargs: functions),
        patch.multiple(flash, **filled),
    ):
        yield


def use_flash(model: nn.Module, name: str = "flash_attention_2") -> None:
    """Let the attention of a model be FlashAttention. Transformers itself would look for the
    package."""
    model.config._attn_implementation_internal = name  # type: ignore[union-attr]
