"""Masks of attention in a sequence that several ranks share.

Every rank knows the whole batch, so masks need no communication. Positions are those in the whole
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.context.group import ContextParallel


class Cover(Enum):
    """The part of a block of scores that counts."""

    NOTHING = "nothing"
    CAUSAL = "the diagonal and below"
    EVERYTHING = "everything"
    SOMETHING = "see `Mask.of`"


@dataclass(frozen=True)
class Span:
    """Neighbouring positions of a sequence."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def last(self) -> int:
        return self.stop - 1

    def halves(self, size: int) -> tuple[Span, ...]:
        """Split the span in two, unless it is at most `size` long."""
        if self.length <= size:
            return (self,)
        half = self.length // 2
        return Span(self.start, half), Span(self.start + half, self.length - half)


class NotATensor(PlanError, AttributeError):
    """Access to an attribute of tensors that a mask does not have; an AttributeError, so that
    `hasattr` returns False."""


@dataclass
class Use:
    """Use of a mask in one call of a model.

    Attributes:
        attended: whether an attention got the mask, for any kind of layers.
    """

    attended: bool = False


@dataclass(frozen=True, eq=False)
class Mask:
    """Causal attention in the whole sequence, for one kind of layers of a model. Blocks get it as
    `attention_mask`.

    Attributes:
        context: the ranks that share the sequence.
        length: tokens in it.
        documents: (batch, seq), on the host, rising in each row: tokens see those of their own
            number only. None: one document.
        padding: (batch, seq), on the host: False for tokens that no other token attends to. None:
            there are none.
        window: a token sees so many tokens at most, itself included. None: all before it.
        use: what became of it, for all kinds of layers.
    """

    context: ContextParallel
    length: int
    documents: Tensor | None = None
    padding: Tensor | None = None
    window: int | None = None
    use: Use = field(default_factory=Use)
    _copies: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    _covers: dict[tuple[Span, Span], Cover] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        """Refuse access to attributes of a tensor, by an attention of a model's own (Doge's dynamic
        mask)."""
        raise NotATensor(
            f"An attention module of the model reads its mask itself (attention_mask.{name}), but"
            " with context parallelism (cp) no rank holds the mask of a whole sequence. Use cp=1."
        )

    def of_layers(self, *, window: int | None, separate: bool) -> Mask:
        """Return this mask for layers with this window (or none), and with or without the
        separation of documents."""
        return replace(
            self, window=window, documents=self.documents if separate else None, _covers={}
        )

    def cover(self, queries: Span, keys: Span) -> Cover:
        """Find the part of a block that is not masked. If it depends on the batch, it is computed
        once for all layers of a kind."""
        if self.documents is None and self.padding is None:
            return self._find_cover(queries, keys)
        if (queries, keys) not in self._covers:
            self._covers[queries, keys] = self._find_cover(queries, keys)
        return self._covers[queries, keys]

    def _find_cover(self, queries: Span, keys: Span) -> Cover:
        """Compute the cover from the corners of the block."""
        if keys.start > queries.last or (
            self.window is not None and queries.start - keys.last >= self.window
        ):
            return Cover.NOTHING
        if self._documents_between(queries, keys) == 0 or (
            self.padding is not None and not self.padding[:, keys.start : keys.stop].any()
        ):
            return Cover.NOTHING
        if self._documents_between(queries, keys) > 1 or (
            self.padding is not None and not self.padding[:, keys.start : keys.stop].all()
        ):
            return Cover.SOMETHING
        if self.window is not None and queries.last - keys.start >= self.window:
            return Cover.SOMETHING
        if keys.last <= queries.start:
            return Cover.EVERYTHING
        return Cover.CAUSAL if queries == keys else Cover.SOMETHING

    def _documents_between(self, queries: Span, keys: Span) -> int:
        """0: no query sees a key. 1: all belong together. 2: neither."""
        if self.documents is None:
            return 1
        first, last = min(queries.start, keys.start), max(queries.last, keys.last)
        if (
            self.documents[:, keys.last] < self.documents[:, queries.start]
        ).all() and keys.last < queries.start:
            return 0
        return 1 if bool((self.documents[:, first] == self.documents[:, last]).all()) else 2

    def of(self, queries: Span, keys: Span, device: torch.device) -> Tensor:
        """(batch or 1, 1, 1, queries, keys): True where a score counts."""
        places = torch.arange(queries.start, queries.stop, device=device).unsqueeze(-1)
        others = torch.arange(keys.start, keys.stop, device=device)
        seen = others <= places
        if self.window is not None:
            seen = seen & (places - others < self.window)
        seen = seen.unsqueeze(0)
        if self.documents is not None:
            documents = self._on(device, "documents", self.documents)
            same = documents[:, queries.start : queries.stop].unsqueeze(-1) == documents[
                :, keys.start : keys.stop
            ].unsqueeze(-2)
            seen = seen & same
        if self.padding is not None:
            seen = seen & self._on(device, "padding", self.padding)[
                :, keys.start : keys.stop
            ].unsqueeze(-2)
        return seen[:, None, None]

    def _on(self, device: torch.device, name: str, host: Tensor) -> Tensor:
        """One copy for all layers. The host does not wait until the device has it."""
        if (name, device) not in self._copies:
            source = host.pin_memory() if device.type == "cuda" else host
            self._copies[name, device] = source.to(device, non_blocking=True)
        return self._copies[name, device]


def mask_of_batch(
    context: ContextParallel,
    shape: tuple[int, int],
    attention_mask: Any,
    position_ids: Tensor | None,
) -> Mask:
    """Make the mask of whole sequences from the arguments of a model.

    Args:
        shape: (batch, seq).

    Raises:
        PlanError: the arguments have other shapes.
    """
    documents = _documents(position_ids, shape[1]) if attention_mask is None else None
    return Mask(context, shape[1], documents=documents, padding=_padding(attention_mask, shape))


def _documents(position_ids: Tensor | None, length: int) -> Tensor | None:
    """Numbers of the packed documents, as Transformers finds them: one begins where positions do
    not continue. None: one in each row."""
    if position_ids is None:
        return None
    if position_ids.ndim != 2 or position_ids.shape[1] != length:
        raise PlanError(
            f"position_ids must have shape (batch, {length}) with context parallelism (cp), one"
            f" number per token; got shape {tuple(position_ids.shape)}."
        )
    host = position_ids.detach().cpu()
    documents = (host.diff(dim=1, prepend=host[:, :1] - 1) != 1).cumsum(1)
    return documents if bool(documents[:, -1].any()) else None


def _padding(attention_mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != shape:
        found = (
            f"shape {tuple(attention_mask.shape)}"
            if isinstance(attention_mask, Tensor)
            else f"a {type(attention_mask).__name__}"
        )
        raise PlanError(
            "With context parallelism (cp), attention_mask must be a padding mask of shape"
            f" {shape}; got {found}. For packed documents, pass position_ids that restart at 0 with"
            " each document."
        )
    host = attention_mask.detach().cpu().bool()
    return None if bool(host.all()) else host
