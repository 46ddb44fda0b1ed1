"""Multi-token prediction: modules behind a causal LM that are trained to predict the tokens after
the next one.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.2. With h^0 the output of
the model (after its last norm), module k = 1, 2, ... computes for each position i

    h'_i = M_k [norm(emb(t_{i+k})) ; norm(h^{k-1}_i)]        h^k = norm(block_k(h'))        P(t_{i+k+1}) = head(h^k_i)

with the embedding and the output head of the model. Its loss is the sum of the cross-entropies of
t_{i+k+1}, divided, as in equation 24 of the report, by the number of targets of the model itself.
The modules are further blocks in the model's own list. So their parameters have the names of
DeepSeek's checkpoints (`model.layers.61.eh_proj.weight`), and whatever is done to blocks is done to
them: sharding, recomputation, expert parallelism. At the end of a sequence the embeddings that are
missing are zeros; nothing is predicted from them.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100
"""Label of a token that does not count in the loss, as in torch's cross-entropy and
Transformers."""


def predict_ahead(model: Any, depths: int) -> None:
    """Append modules of multi-token prediction to a causal LM of DeepSeek-V3's kind, in place.

    In training, a call of the model with `labels` then also computes `output.mtp_loss`: the mean of
    the modules' losses. `output.loss` stays that of the model.

    Args:
        model: on meta or in memory. Its blocks are `model.model.layers`, its norms are made as
            `model.model.norm`.
        depths: number of modules.
    """
    config, base = model.config, model.get_decoder()
    kind: Any = type(base.layers[-1])
    norm: Any = type(base.norm)
    reference = next(base.norm.parameters())
    for index in range(len(base.layers), len(base.layers) + depths):
        block = kind(config, index)
        block.enorm, block.hnorm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        block.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        block.shared_head = NormOfHead(norm(config.hidden_size, eps=config.rms_norm_eps))
        block.__class__ = _with(PredictsAhead, kind)
        if not reference.is_meta:
            for child in block.modules():
                model._init_weights(child)
        base.layers.append(block.to(reference.dtype))
    config.num_nextn_predict_layers = depths
    model.mtp_layers = depths
    own: Any = type(model)
    model.__class__ = _with(MultiTokenLM, own)


@cache
def _with(mixin: Any, kind: Any) -> type:
    """Make a subclass of a Transformers class that keeps its name and module, by which checkpoints
    and the self-check know it, and the signature of its forward, by which context parallelism knows
    its arguments."""

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "forward": forward})


class NormOfHead(nn.Module):
    """The norm in front of the shared output head. DeepSeek's checkpoints call it
    `shared_head.norm`."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class PredictsAhead:
    """Mixin for a block that is a module of multi-token prediction."""

    predicts_ahead = True
    """See `models.parallel_plan.AHEAD`."""

    def forward(self: Any, hidden: Tensor, *args: Any, ahead: Tensor, **kwargs: Any) -> Tensor:
        """Compute the hidden states of the next depth.

        Args:
            hidden: those of the depth before, (batch, sequence, hidden).
            ahead: embedding of the token of this depth, same shape.

        Returns:
            Same shape, normalized.
        """
        joined = torch.cat([self.enorm(ahead), self.hnorm(hidden)], dim=-1)
        return self.shared_head(super().forward(self.eh_proj(joined), *args, **kwargs))  # type: ignore[misc]


@dataclass
class _Seen:
    """What the modules take from a forward of the model.

    Attributes:
        embedding: output of the token embedding, (batch, sequence, hidden).
        hidden: input of the output head, same shape.
        arguments: keyword arguments of the last block of the model: masks, positions.
    """

    embedding: Tensor | None = None
    hidden: Tensor | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


class MultiTokenLM:
    """Mixin for a causal LM whose list of blocks ends with modules of multi-token prediction.

    Attributes:
        mtp_layers: number of modules. It is part of the model's description in checkpoints.
        returns_mtp_logits: whether every call that is not training also returns the logits of the
            modules, as `mtp_logits_1`, ... The self-check compares them.
    """

    mtp_layers: int
    returns_mtp_logits: bool = False

    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        targets = labels if self.training else None
        if targets is None and not self.returns_mtp_logits:
            return super().forward(*args, labels=labels, **kwargs)  # type: ignore[misc]
        with _watching(self) as seen:
            output = super().forward(*args, labels=labels, **kwargs)  # type: ignore[misc]
        if targets is not None:
            output.mtp_loss = _mean_loss(self, seen, targets)
        else:
            for depth, hidden in enumerate(_hidden_ahead(self, seen), start=1):
                output[f"mtp_logits_{depth}"] = self.get_output_embeddings()(hidden)
        return output

    def tokens_ahead(self, values: Tensor) -> Iterator[Tensor]:
        """Yield what stands 1, 2, ... `mtp_layers` tokens after each position of `values`, zeros
        where nothing does.

        Args:
            values: (batch, sequence, hidden).
        """
        return (following(values, depth, 0.0) for depth in range(1, self.mtp_layers + 1))

    def own_targets(self, targets: Tensor) -> Tensor:
        """Select the positions, of targets (batch, sequence), for which this process computes
        logits: all."""
        return targets


@contextmanager
def _watching(model: Any) -> Iterator[_Seen]:
    """Note what the modules take from the forward in the body. On a later pipeline stage, the
    embedding is what travelled there."""
    seen = _Seen()

    def note_embedding(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.embedding = output

    def note_arguments(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.arguments = {key: value for key, value in kwargs.items() if key != "hidden_states"}

    def note_hidden(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.hidden = args[0]

    last = model.get_decoder().layers[model.config.num_hidden_layers - 1]
    handles = [
        model.get_input_embeddings().register_forward_hook(note_embedding),
        last.register_forward_pre_hook(note_arguments, with_kwargs=True),
        model.get_output_embeddings().register_forward_pre_hook(note_hidden),
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _hidden_ahead(model: Any, seen: _Seen) -> Iterator[Tensor]:
    """Run the modules one after the other. Yields the hidden states of each, (batch, sequence,
    hidden), from which the head predicts."""
    assert seen.embedding is not None and seen.hidden is not None
    hidden = seen.hidden
    blocks = model.get_decoder().layers[model.config.num_hidden_layers :]
    for block, ahead in zip(blocks, model.tokens_ahead(seen.embedding), strict=True):
        hidden = block(hidden, ahead=ahead, **seen.arguments)
        yield hidden


def _mean_loss(model: Any, seen: _Seen, labels: Tensor) -> Tensor:
    """Mean of the losses of all modules, each a sum over its targets divided by the targets of the
    model; shape ().

    Args:
        labels: (batch, sequence), of whole sequences also where this process has a part of their
            tokens.
    """
    head = model.get_output_embeddings()
    targets = following(labels, 1, IGNORE)
    count = (targets != IGNORE).sum().clamp(min=1)
    losses = []
    for depth, hidden in enumerate(_hidden_ahead(model, seen), start=1):
        # A target counts only where the tokens between are targets, too: otherwise, one of them
        # begins another document.
        targets = following(labels, depth + 1, IGNORE).masked_fill(targets == IGNORE, IGNORE)
        losses.append(
            model.loss_function(
                logits=head(hidden),
                labels=None,
                shift_labels=model.own_targets(targets),
                vocab_size=model.config.vocab_size,
                num_items_in_batch=count,
                further=True,
            )
        )
    return torch.stack(losses).mean()


def following(values: Tensor, distance: int, filler: float) -> Tensor:
    """Give each position what stands `distance` tokens after it, and `filler` where nothing does.

    Args:
        values: (batch, sequence, ...).
    """
    shifted = values[:, distance:]
    missing = values.shape[1] - shifted.shape[1]
    return F.pad(shifted, (*([0, 0] * (values.ndim - 2)), 0, missing), value=filler)
