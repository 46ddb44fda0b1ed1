"""Attention of some queries to some keys, with the log-sum-exp needed to combine it with attention
to other keys.

Two parts of the keys give (out, lse) each; together they are the mean of the outs, weighted by
exp(lse) (online softmax; Milakov and Gimelshein, arXiv:1805.02867; Dao et al., FlashAttention,
arXiv:2205.14135). Given the lse of all keys, the backward of one part needs nothing from the other
parts.

A block of scores that is partly masked (at the edge of a window or of a document, or by padding) is
halved until each part is unmasked, fully masked, or small. On CUDA, 16-bit parts that are unmasked
or causal use PyTorch's flash attention: FlashAttention 2, or other kernels if the model asked for
them (`choose_kernels`). All others, and everything on the CPU, are computed in tiles by plain
matrix products: no more than `TILE_ELEMENTS` scores exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.compat.torch import (
    flash_attention,
    flash_attention_backward,
    flash_kernels,
    use_flash_kernels,
)
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.context.masks import Cover, Mask, Span

TILE_ELEMENTS = 2**22
"""Scores of a tile, over the batch and all heads; three tensors of this size exist at a time."""

LARGEST_TILE = 1024


PACKAGES = {
    "flash_attention_3": ("FA3", "flash_attn_interface"),
    "flash_attention_4": ("FA4", "flash_attn.cute"),
}
"""Attention implementations of Transformers -> (the kernels, the package that has them)."""


def choose_kernels(implementation: str | None) -> None:
    """Use the kernels that a model asked for by its attention implementation, instead of
    FlashAttention 2; in this process, from now on.

    Raises:
        ConfigError: their package is not installed.
    """
    version, package = PACKAGES.get(implementation or "", ("FA2", "torch"))
    try:
        use_flash_kernels(version)
    except ImportError as error:
        raise ConfigError(
            f"With context parallelism (cp), attn_implementation={implementation} needs the package"
            f" {package}: {error}. Install it, or use attn_implementation=sdpa, which uses"
            " FlashAttention 2."
        ) from error


@dataclass(frozen=True)
class Scores:
    """Computation of attention scores from products of queries and keys.

    Attributes:
        scale: factor of the scores.
        softcap: c in c * tanh(score / c); None for none.
    """

    scale: float
    softcap: float | None = None


@dataclass
class Result:
    """Result of the queries with the keys so far: `out` (batch, heads, queries, width) and `lse`
    (batch, heads, queries), in the type of accumulation."""

    out: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, query: Tensor, width: int) -> Result:
        dtype = wide(query.dtype)
        out = query.new_zeros((*query.shape[:-1], width), dtype=dtype)
        return cls(out, query.new_full(query.shape[:-1], -torch.inf, dtype=dtype))

    def narrow(self, start: int, length: int) -> Result:
        return Result(self.out.narrow(2, start, length), self.lse.narrow(2, start, length))

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add the result of other keys."""
        total = torch.logaddexp(self.lse, lse)
        level = finite(total)
        self.out.mul_((self.lse - level).exp_().unsqueeze(-1)).add_(
            out * (lse - level).exp_().unsqueeze(-1)
        )
        self.lse.copy_(total)


@dataclass
class Gradients:
    """Gradients of queries, keys and values; in the type of accumulation."""

    query: Tensor
    key: Tensor
    value: Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which blocks are accumulated."""
    return torch.promote_types(dtype, torch.float32)


def finite(lse: Tensor) -> Tensor:
    """Replace the log of an empty sum by 0, so that differences are not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def attend(
    result: Result,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Span,
    keys: Span,
    mask: Mask,
    scores: Scores,
) -> None:
    """Add the attention of `query`, at positions `queries`, to `key` and `value`, at positions
    `keys`, to `result`.

    Args:
        query: (batch, heads, queries, width). key, value: (batch, key heads, keys, width), which
            divide the heads.
    """
    for rows, columns, cover in _parts(queries, keys, mask, query, value, scores):
        own, there = (
            (2, rows.start - queries.start, rows.length),
            (2, columns.start - keys.start, columns.length),
        )
        q, k, v = query.narrow(*own), key.narrow(*there), value.narrow(*there)
        if _fused(query, value, cover, scores):
            out, lse = flash_attention(
                q, k, _as_wide(v, q), causal=cover is Cover.CAUSAL, scale=scores.scale
            )
            out = out[..., : v.shape[-1]]
        else:
            out, lse = _tile_forward(
                q, k, v, _seen(mask, rows, columns, cover, query.device), scores
            )
        result.narrow(*own[1:]).add(out.to(result.out.dtype), lse.to(result.lse.dtype))


def attend_backward(
    gradients: Gradients,
    grad_out: Tensor,
    delta: Tensor,
    result: Result,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Span,
    keys: Span,
    mask: Mask,
    scores: Scores,
) -> None:
    """Add the contribution of a block to `gradients`.

    Args:
        grad_out: gradient of `result.out`, (batch, heads, queries, value width).
        delta: row-wise product of both, (batch, heads, queries).
        result: result of the queries with all keys.
    """
    for rows, columns, cover in _parts(queries, keys, mask, query, value, scores):
        own, there = (
            (2, rows.start - queries.start, rows.length),
            (2, columns.start - keys.start, columns.length),
        )
        q, k, v = query.narrow(*own), key.narrow(*there), value.narrow(*there)
        grad, seen_by = grad_out.narrow(*own), result.narrow(*own[1:])
        if _fused(query, value, cover, scores):
            wide_v, *made = (_as_wide(x, q) for x in (v, grad.to(query.dtype), seen_by.out))
            # the kernel ignores strides
            grad, out, lse = (x.contiguous() for x in (*made, seen_by.lse))
            found = flash_attention_backward(
                grad, q, k, wide_v, out, lse, causal=cover is Cover.CAUSAL, scale=scores.scale
            )
            found = (*found[:2], found[2][..., : v.shape[-1]])
        else:
            seen = _seen(mask, rows, columns, cover, query.device)
            found = _tile_backward(
                q, grad, delta.narrow(*own), finite(seen_by.lse), k, v, seen, scores
            )
        for total, part, place in zip(
            (gradients.query, gradients.key, gradients.value),
            found,
            (own, there, there),
            strict=True,
        ):
            total.narrow(*place).add_(part)


def _parts(
    queries: Span, keys: Span, mask: Mask, query: Tensor, value: Tensor, scores: Scores
) -> Iterator[tuple[Span, Span, Cover]]:
    """The part of a block that counts, in parts that are computed at once: tiles, and all that
    flash attention can compute."""
    cover, size = mask.cover(queries, keys), _tile(query)
    if cover is Cover.NOTHING:
        return
    if max(queries.length, keys.length) <= size or _fused(query, value, cover, scores):
        yield queries, keys, cover
        return
    for rows in queries.halves(size):
        for columns in keys.halves(size):
            yield from _parts(rows, columns, mask, query, value, scores)


def _fused(query: Tensor, value: Tensor, cover: Cover, scores: Scores) -> bool:
    """True if flash attention can compute a part."""
    fits = value.shape[-1] <= query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    whole = cover in (Cover.EVERYTHING, Cover.CAUSAL)
    possible = (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and fits
        and whole
        and scores.softcap is None
    )
    return possible and flash_trains_on(_capability(query.device), query.shape[-1], flash_kernels())


def flash_trains_on(capability: tuple[int, int], width: int, kernels: str = "FA2") -> bool:
    """Return whether flash attention without dropout has a forward and a backward on a GPU: as
    torch's `sdp_utils.cpp` says of its own kernels, and `torch.nn.attention._fa3` and `_fa4` of
    others."""
    if kernels == "FA3":
        return capability[0] == 9
    if kernels == "FA4":
        return capability[0] in (9, 10) and width <= 128
    less_shared_memory = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    return (8, 0) <= capability <= (12, 1) and not (less_shared_memory and 192 < width <= 224)


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _as_wide(x: Tensor, query: Tensor) -> Tensor:
    """Pad values, or results, with zeros if keys are wider (multi-head latent attention): flash
    attention has one width."""
    missing = query.shape[-1] - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x


def _tile(query: Tensor) -> int:
    """Rows and columns of a tile."""
    return min(LARGEST_TILE, max(16, isqrt(TILE_ELEMENTS // (query.shape[0] * query.shape[1]))))


def _seen(
    mask: Mask, rows: Span, columns: Span, cover: Cover, device: torch.device
) -> Tensor | None:
    return None if cover is Cover.EVERYTHING else mask.of(rows, columns, device)


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, ...) -> (batch, key heads, heads of each * ..., width): a product with keys
    that are not repeated."""
    return x.reshape(x.shape[0], key.shape[1], -1, x.shape[-1]).to(wide(x.dtype))


def _scores(
    query: Tensor, key: Tensor, seen: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor | None]:
    """((batch, key heads, heads of each, queries, keys), tanh of the capped ones)."""
    product = (_grouped(query, key) * scores.scale) @ key.to(wide(key.dtype)).transpose(-1, -2)
    product = product.unflatten(2, (-1, query.shape[2]))
    bent = None
    if scores.softcap is not None:
        bent = (product / scores.softcap).tanh_()
        product = bent * scores.softcap
    return (product if seen is None else product.masked_fill_(~seen, -torch.inf)), bent


def _tile_forward(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scores: Scores
) -> tuple[Tensor, Tensor]:
    product, _ = _scores(query, key, seen, scores)
    level = finite(product.amax(-1, keepdim=True))
    weights = product.sub_(level).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (level + total.log()).flatten(1, 2).squeeze(-1)
    out = weights.flatten(2, 3) @ value.to(weights.dtype)
    out = out.view(*query.shape[:-1], value.shape[-1])
    return out / total.masked_fill(total == 0, 1.0).view(*query.shape[:-1], 1), lse


def _tile_backward(
    query: Tensor,
    grad_out: Tensor,
    delta: Tensor,
    lse: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a tile's queries, keys and values."""
    product, bent = _scores(query, key, seen, scores)
    group = product.shape[2]
    weights = product.sub_(lse.unflatten(1, (-1, group)).unsqueeze(-1)).exp_()
    grad_out = _grouped(grad_out, key)
    grad_value = weights.flatten(2, 3).transpose(-1, -2) @ grad_out
    grad_product = (grad_out @ value.to(grad_out.dtype).transpose(-1, -2)).view_as(weights)
    grad_product.sub_(delta.unflatten(1, (-1, group)).unsqueeze(-1)).mul_(weights)
    if bent is not None:
        grad_product.mul_(1.0 - bent.square())
    grad_product = grad_product.flatten(2, 3).mul_(scores.scale)
    grad_query = (grad_product @ key.to(grad_product.dtype)).view(query.shape)
    return grad_query, grad_product.transpose(-1, -2) @ _grouped(query, key), grad_value
