"""FlashAttention's functions as products on the CPU, for the trial of a model with few tokens
(`document_trial`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_3d.compat.transformers_flash import replaced_kernels


def attend_in_rows(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention in each row; (rows, tokens, heads, width)."""
    rows, length = q.shape[:2]
    ends = torch.arange(rows + 1) * length
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out = attend_in_documents(flat[0], flat[1], flat[2], ends, ends, length, length, **options)
    return out.unflatten(0, (rows, length))


def attend_in_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention in each document; (tokens, heads, width).

    Args:
        cu_seqlens_q: begins of the documents and the end of the last one; for keys, the same.
        window_size: tokens to the left and to the right of a query that it sees; -1: all.
        s_aux: (heads,), scores of the sinks.
    """
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
    scores = scores * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(len(q))
    document = torch.searchsorted(cu_seqlens_q.long(), places, right=True)
    behind = places[:, None] - places
    seen = document[:, None] == document
    left, right = window_size
    if left >= 0:
        seen &= behind <= left
    if causal or right >= 0:
        seen &= behind >= (0 if causal else -right)
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(-1, 1, 1).expand(-1, len(q), 1)], dim=-1)
    shares = scores.softmax(-1)[..., : len(k)]
    return torch.einsum(
        "hqk,khd->qhd", shares, v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    ).contiguous()


def on_the_cpu() -> Any:
    """Context in which models with FlashAttention run on the CPU."""
    return replaced_kernels(attend_in_rows, attend_in_documents)
