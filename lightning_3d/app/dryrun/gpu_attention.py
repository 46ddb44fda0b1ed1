"""Attention as GPUs compute it. torch's fused kernel for CPUs needs values as wide as queries, and
without it all scores are kept. Latent attention (DeepSeek) has wider queries, for which GPUs have a
fused kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.compat.torch_fake import efficient_attention, is_fake


@contextmanager
def gpu_attention(active: bool) -> Iterator[None]:
    """Compute `scaled_dot_product_attention` of fake tensors with the kernel of GPUs where that of
    CPUs is not fused.

    Args:
        active: whether the job runs on GPUs; otherwise nothing changes.
    """
    if not active:
        yield
        return
    own: Any = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.shape[-1] == value.shape[-1] or kwargs.get("enable_gqa") or not is_fake(query):
            attended: Tensor = own(query, key, value, *args, **kwargs)
            return attended
        kwargs.pop("enable_gqa", None)
        return efficient_attention(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = own
