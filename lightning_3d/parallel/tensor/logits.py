"""Logits that are sharded by vocabulary but report the full shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.parallel.deferred_logits import computed
from lightning_3d.parallel.partial_tensors import (
    ALIKE,
    OF_THE_PART,
    OF_THE_WHOLE,
    changes_in_place,
    is_scalar_operation,
    whole_arguments,
)
from lightning_3d.parallel.tensor.collectives import gather_from_region
from lightning_3d.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from lightning_3d.parallel.tensor.group import TensorParallel


class VocabParallelLogits(Tensor):
    """This rank's columns of logits that report the full shape.

    Reading sizes and types communicates nothing. Operations that treat every entry alike (casting,
    scaling, a soft cap, detach), that leave the last dimension alone (`logits[:, :-1]`, `view(-1,
    vocabulary)`) and the cross-entropy of flat logits stay on the shards. Everything else sees the
    full logits: they are gathered over the tensor-parallel group by one all-gather, with gradients,
    at the first such use and kept. Like any collective, this must happen on all ranks of the group:
    code that reads logits only on rank 0 hangs. Changing logits in place is refused: write `logits
    = logits.masked_fill(...)`.

    Attributes:
        local: (..., local vocabulary), a plain tensor.
        sizes: columns on each rank of the group.
        context: the tensor-parallel group.
    """

    local: Tensor
    sizes: tuple[int, ...]
    context: TensorParallel
    _full: Tensor | None

    @staticmethod
    def __new__(
        cls, local: Tensor, sizes: Sequence[int], context: TensorParallel
    ) -> VocabParallelLogits:
        # The base is a tensor on meta: it knows the full shape, holds no memory, and anything that
        # gets past __torch_function__ fails loudly instead of computing with a part of the
        # vocabulary.
        base = torch.empty((*local.shape[:-1], sum(sizes)), dtype=local.dtype, device="meta")
        return base.as_subclass(cls)

    def __init__(self, local: Tensor, sizes: Sequence[int], context: TensorParallel) -> None:
        self.local, self.sizes, self.context, self._full = local, tuple(sizes), context, None

    @property
    def vocab_offset(self) -> int:
        """First column of this rank."""
        return sum(self.sizes[: self.context.rank])

    @property
    def vocabulary(self) -> int:
        return sum(self.sizes)

    def full(self) -> Tensor:
        """The logits of the whole vocabulary as a plain tensor; one all-gather at the first
        call."""
        if self._full is None or (
            torch.is_grad_enabled() and self.local.requires_grad and not self._full.requires_grad
        ):
            self._full = gather_from_region(
                computed(self.local), self.context.group, dim=-1, sizes=self.sizes
            )
        return self._full

    def like(self, local: Tensor) -> VocabParallelLogits:
        """Logits with other values and the same columns."""
        return VocabParallelLogits(local, self.sizes, self.context)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else None
        if isinstance(logits, VocabParallelLogits):
            if func in OF_THE_WHOLE:
                return super().__torch_function__(func, types, args, kwargs)
            if func in OF_THE_PART:
                return func(logits.local, *args[1:], **kwargs)
            if func in ALIKE and is_scalar_operation(args[1:], kwargs):
                return logits.like(func(logits.local, *args[1:], **kwargs))
            special = _SPECIAL.get(func)
            result = special(logits, *args[1:], **kwargs) if special is not None else NotImplemented
            if result is not NotImplemented:
                return result
        if changes_in_place(func, kwargs):
            raise PlanError(
                f"{func.__name__} would change logits in place, but with tensor parallelism each"
                " rank holds a part of the vocabulary. Make a new tensor instead, for example"
                " logits = logits.masked_fill(mask, value)."
            )
        return func(
            *whole_arguments(args, VocabParallelLogits),
            **whole_arguments(kwargs, VocabParallelLogits),
        )


def _to(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> Any:
    """Another type on the same device stays a shard; another device gets the full logits."""
    moved = logits.local.to(
        *_local_examples(args), **{key: _local_example(value) for key, value in kwargs.items()}
    )
    return logits.like(moved) if moved.device == logits.local.device else NotImplemented


def _local_examples(args: Sequence[Any]) -> list[Any]:
    return [_local_example(value) for value in args]


def _local_example(value: Any) -> Any:
    return value.local if isinstance(value, VocabParallelLogits) else value


def _view(logits: VocabParallelLogits, *shape: Any, **kwargs: Any) -> Any:
    """`view` and `reshape` that only regroup the leading dimensions."""
    if (
        kwargs
        or not shape
        or not all(isinstance(size, (int, tuple, list, torch.Size)) for size in shape)
    ):
        return NotImplemented
    asked = list(shape[0]) if not isinstance(shape[0], int) else list(shape)
    if asked[-1] not in (-1, logits.vocabulary):
        return NotImplemented
    rows = math.prod(logits.local.shape[:-1])
    leading = asked[:-1]
    if -1 in leading:
        known = math.prod(size for size in leading if size != -1)
        leading[leading.index(-1)] = rows // known if known else 0
    if math.prod(leading) != rows:
        return NotImplemented
    return logits.like(logits.local.reshape(*leading, logits.local.shape[-1]))


def _flatten(logits: VocabParallelLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.local.ndim == logits.local.ndim - 1:
        return NotImplemented
    return logits.like(logits.local.flatten(start_dim, end_dim))


def _index(logits: VocabParallelLogits, key: Any) -> Any:
    """Indexing that takes all of the last dimension."""
    entries = key if isinstance(key, tuple) else (key,)
    if isinstance(key, Tensor):
        covered = key.ndim if key.dtype == torch.bool else 1
        keeps = covered < logits.local.ndim
    elif all(
        entry is None or entry is Ellipsis or isinstance(entry, (int, slice)) for entry in entries
    ):
        picked = [entry for entry in entries if entry is not None]
        reaches_last = Ellipsis in picked[:-1] or (
            Ellipsis not in picked and len(picked) >= logits.local.ndim
        )
        keeps = entries[-1:] != (None,) and (not reaches_last or picked[-1] == slice(None))
    else:
        keeps = False
    return logits.like(logits.local[key]) if keeps else NotImplemented


def _cross_entropy(
    logits: VocabParallelLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """The usual call, (tokens, vocabulary) and (tokens,); others, such as label smoothing, see the
    full logits."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if (
        not plain
        or logits.local.ndim != 2
        or target.ndim != 1
        or reduction not in ("none", "sum", "mean")
    ):
        return NotImplemented
    losses = vocab_parallel_cross_entropy(
        computed(logits.local), target, logits.vocab_offset, logits.context.group, ignore_index
    )
    if reduction == "sum":
        losses = losses.sum()
    elif reduction == "mean":
        losses = losses.sum() / (target != ignore_index).sum()
    return losses.to(logits.dtype)


def _represent(logits: VocabParallelLogits, *args: Any, **kwargs: Any) -> str:
    return (
        f"VocabParallelLogits(shape={tuple(logits.shape)}, dtype={logits.dtype}, columns"
        f" {logits.vocab_offset} to {logits.vocab_offset + logits.local.shape[-1] - 1} on this"
        " rank)"
    )


_SPECIAL: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.to: _to,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.__getitem__: _index,
    F.cross_entropy: _cross_entropy,
    Tensor.__repr__: _represent,
}
