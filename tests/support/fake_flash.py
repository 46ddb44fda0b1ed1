"""FlashAttention 2 of Transformers without its package: torch computes it on any device, and waits where the package waits."""

from collections.abc import Iterator
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
) -> Tensor:
    """Causal attention within each document; shapes (tokens, heads, width). The lengths must be numbers: a tensor is read."""
    assert causal and dropout_p == 0.0 and int(max_seqlen_q) == int(max_seqlen_k)
    places = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(cu_seqlens_q.long(), places, right=True)
    mask = (document[:, None] == document) & (places[:, None] >= places)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """Causal attention; shapes (rows, tokens, heads, width)."""
    assert causal and dropout_p == 0.0
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)


@contextmanager
def fake_flash() -> Iterator[None]:
    """Context in which models may use `flash_attention_2`, see `use_flash`."""
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    with patch.object(flash, "_lazy_imports", lambda *args, **kwargs: functions), patch.object(flash, "_loaded_implementation", None):
        yield


def use_flash(model: nn.Module) -> None:
    """Let the attention of a model be FlashAttention 2. Transformers itself would look for the package."""
    model.config._attn_implementation_internal = "flash_attention_2"  # type: ignore[union-attr]
