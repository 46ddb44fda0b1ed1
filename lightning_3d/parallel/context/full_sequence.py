"""Outputs that are sharded along the sequence but report the full shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.context.collectives import gather_sequence
from lightning_3d.parallel.context.group import ContextParallel
from lightning_3d.parallel.context.zigzag import own_tokens
from lightning_3d.parallel.deferred_logits import computed
from lightning_3d.parallel.partial_tensors import (
    ALIKE,
    OF_THE_PART,
    OF_THE_WHOLE,
    changes_in_place,
    is_scalar_operation,
    whole_arguments,
)


class WholeSequence(Tensor):
    """This rank's tokens of a tensor that reports the full shape (batch, seq, ...).

    Reading sizes and types communicates nothing, and operations that treat every entry alike
    (casting, scaling, a soft cap) stay on this rank's tokens. Any other use sees all tokens in
    their order. At the first such use they are gathered over the context-parallel group by one
    all-gather, with gradients, and kept. All ranks of the group must use the tensor in the same
    way.

    Attributes:
        local: (batch, seq / cp, ...); logits may be sharded by vocabulary too.
        context: the context-parallel group.
    """

    local: Tensor
    context: ContextParallel
    _full: Tensor | None

    @staticmethod
    def __new__(cls, local: Tensor, context: ContextParallel) -> WholeSequence:
        # On meta: what gets past __torch_function__ fails loudly instead of computing with a part
        # of the sequence.
        shape = (local.shape[0], local.shape[1] * context.size, *local.shape[2:])
        return torch.empty(shape, dtype=local.dtype, device="meta").as_subclass(cls)

    def __init__(self, local: Tensor, context: ContextParallel) -> None:
        self.local, self.context, self._full = local, context, None

    def full(self) -> Tensor:
        """All tokens, still sharded by vocabulary; one all-gather at the first call."""
        outdated = (
            self._full is not None
            and self.local.requires_grad
            and not self._full.requires_grad
            and torch.is_grad_enabled()
        )
        if self._full is None or outdated:
            of_vocabulary: Any = self.local
            if hasattr(of_vocabulary, "like"):
                self._full = of_vocabulary.like(
                    gather_sequence(computed(of_vocabulary.local), self.context)
                )
            else:
                self._full = gather_sequence(computed(self.local), self.context)
        assert self._full is not None
        return self._full

    def own(self, whole: Tensor) -> Tensor:
        """Select this rank's tokens of a tensor (batch, seq, ...) of all."""
        return own_tokens(whole, self.context.size, self.context.rank)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], WholeSequence):
            if func in OF_THE_WHOLE:
                return super().__torch_function__(func, types, args, kwargs)
            if func in OF_THE_PART:
                return func(args[0].local, *args[1:], **kwargs)
            if func in ALIKE and is_scalar_operation(args[1:], kwargs):
                return WholeSequence(func(args[0].local, *args[1:], **kwargs), args[0].context)
        if args and isinstance(args[0], WholeSequence) and changes_in_place(func, kwargs):
            raise PlanError(
                f"{func.__name__} would change a tensor of the whole sequence in place, but with"
                " context parallelism (cp) each rank holds a part of the tokens. Make a new tensor"
                " instead, for example logits = logits.masked_fill(mask, value)."
            )
        return func(*whole_arguments(args, WholeSequence), **whole_arguments(kwargs, WholeSequence))


def whole_outputs(value: Any, shape: tuple[int, int], context: ContextParallel) -> Any:
    """Replace every tensor in a model's output whose shape begins with `shape`, (batch, seq / cp),
    by a `WholeSequence`."""
    if isinstance(value, Tensor):
        return WholeSequence(value, context) if tuple(value.shape[:2]) == shape else value
    if isinstance(value, Mapping):
        if type(value) is dict:
            return {key: whole_outputs(item, shape, context) for key, item in value.items()}
        for key, item in list(value.items()):  # a ModelOutput of Transformers
            value[key] = whole_outputs(item, shape, context)  # type: ignore[index]
        return value
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(whole_outputs(item, shape, context) for item in value)
    return value
