"""The attention and the mask function that Transformers models find under the name `NAME`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.parallel.context.kernels import Scores
from lightning_3d.parallel.context.masks import Mask
from lightning_3d.parallel.context.operators import local_attention, ring_attention
from lightning_3d.parallel.context.ulysses import ulysses_attention

NAME = "lightning_3d_context"
KINDS: dict[str, Callable[..., Tensor]] = {"ring": ring_attention, "ulysses": ulysses_attention}


@dataclass
class Running:
    """The call of a model that is running.

    Attributes:
        mask: mask of the whole sequence.
        positions: ids of the tokens that the model sees, (batch or 1, seq / cp), or whole
            sequences.
        rows: rows of the batch.
        layers: kinds of layers seen so far, see `make_mask`.
    """

    mask: Mask
    positions: Tensor
    rows: int
    layers: dict[Any, bool]


_running: ContextVar[Running | None] = ContextVar("running", default=None)


@contextmanager
def running(call: Running) -> Iterator[Running]:
    """Context of one call of a model. Masks that are made in it belong to this call; blocks get
    them as arguments, also in a recomputation."""
    token = _running.set(call)
    try:
        yield call
    finally:
        _running.reset(token)


def register() -> None:
    """Register the attention and the mask function with Transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of Transformers' interface: (batch, heads, seq / cp, width) -> (batch, seq / cp,
    heads, width). In a module that gathers the sequence (`MixingTokens`), each rank attends with
    all tokens.

    Raises:
        PlanError: the model makes masks of its own, adds biases, is not causal, or was called
            without the module that shards the sequence.
        ConfigError: dropout.
    """
    name = type(module).__name__
    whole = isinstance(attention_mask, Mask) and query.shape[2] == attention_mask.length
    if not isinstance(attention_mask, Mask) or not (
        whole or query.shape[2] * attention_mask.context.size == attention_mask.length
    ):
        raise PlanError(
            f"{name} was called with an attention mask that context parallelism (cp) did not"
            " create. Create the model's masks with Transformers' create_causal_mask, and call the"
            " whole model in the step, not a part of it."
        )
    if position_bias is not None:
        raise PlanError(
            f"{name} adds biases to its attention scores, which context parallelism does not"
            " support. Use cp=1."
        )
    if is_causal is False or is_causal is None and getattr(module, "is_causal", True) is False:
        raise PlanError(
            f"{name} was called with is_causal=False, but context parallelism (cp) has replaced its"
            " attention by a causal one. Set is_causal=False on the attention modules before"
            " training starts, or use cp=1."
        )
    if dropout > 0:
        raise ConfigError(
            f"{name} has attention_dropout={dropout}, which context parallelism (cp) does not"
            " support. Set it to 0."
        )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    scores = Scores(scaling if scaling is not None else query.shape[-1] ** -0.5, softcap)
    attention_mask.use.attended = True
    compute = local_attention if whole else KINDS[attention_mask.context.kind]
    out = compute(query, key, value, attention_mask, scores, s_aux)
    return out.transpose(1, 2).contiguous(), None


def make_mask(
    *,
    mask_function: Callable[..., Tensor],
    q_length: int | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Mask:
    """Make the mask of one kind of layers, which replaces a tensor.

    Args:
        mask_function: (batch, head, query, key) -> True if the score counts, as the model sees it
            for only this rank's tokens.
        q_length: number of this rank's tokens.
        cache_position: their places, in versions of Transformers that pass them (5.2).
        local_size: the window of these layers.

    Raises:
        PlanError: the model was not called itself, or its mask is neither causal nor causal with a
            window.
    """
    call = _running.get()
    if call is None:
        raise PlanError(
            "The step called only a part of the model. With context parallelism (cp), it must call"
            " the whole model, because the model's forward shards the sequence."
        )
    if q_length is None:
        assert cache_position is not None
        q_length, device = len(cache_position), cache_position.device
    kind = (local_size, attention_mask is None)
    separate = call.layers.get(kind)
    if separate is None:
        separate = _separates_documents(call, q_length, mask_function, local_size, device)
        if separate is not None:
            call.layers[kind] = separate
    return call.mask.of_layers(window=local_size, separate=separate is not False)


def _separates_documents(
    call: Running,
    length: int,
    mask_function: Callable[..., Tensor],
    window: int | None,
    device: Any,
) -> bool | None:
    """True if layers keep packed documents apart: evaluates their mask on some pairs of this rank's
    tokens.

    This rank's tokens are two chunks of the sequence, the late one first, so that a mask that looks
    at positions takes them for two documents, and one that does not takes them for one. Where the
    model sees whole sequences (`SplitModel`), there may be one document only. None: by chance that
    is the same here.
    """
    half = length // 2
    near = {
        0,
        1,
        half - 1,
        half,
        half + 1,
        length - 1,
        *(() if window is None else (window - 1, window, window + 1)),
    }
    with_documents = (call.positions.diff() != 1).any(1).nonzero().flatten()[:1].tolist()
    row = with_documents[0] if with_documents else 0
    positions = call.positions[row].to(device)
    for begin in (positions.diff() != 1).nonzero().flatten()[:2].tolist():
        near |= {begin, begin + 1}
    places = torch.tensor(sorted(place for place in near if 0 <= place < length), device=device)
    head = torch.zeros((), dtype=torch.long, device=device)
    queries, keys = places.unsqueeze(-1), places.unsqueeze(0)
    found = mask_function(torch.full_like(head, row), head, queries, keys).expand(
        len(places), len(places)
    )

    def causal(queries: Tensor, keys: Tensor) -> Tensor:
        return (keys <= queries) & (queries - keys < (window if window is not None else torch.inf))

    parts = (positions.diff(prepend=positions[:1] - 1) != 1).cumsum(0)
    apart = (parts[queries] == parts[keys]) & causal(positions[queries], positions[keys])
    if torch.equal(apart, causal(queries, keys)) and torch.equal(found, apart):
        return None
    if torch.equal(found, apart) or torch.equal(found, causal(queries, keys)):
        return torch.equal(found, apart)
    raise PlanError(
        "A layer of the model has a mask that context parallelism (cp) does not support: masks must"
        " be causal, with or without a sliding window. Use cp=1."
    )
