"""Sharded layers. Each is a subclass of the layer it replaces and holds its shard as a plain
parameter.

`rewrite.py` turns a layer into one of these by changing its class, so no `__init__` runs; the
attributes that are declared here are set then. All ranks of the tensor-parallel group run the same
layers in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.parallel.deferred_logits import deferred
from lightning_3d.parallel.random_streams import Stream
from lightning_3d.parallel.tensor.collectives import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    split_to_region,
)
from lightning_3d.parallel.tensor.group import TensorParallel
from lightning_3d.parallel.tensor.logits import VocabParallelLogits
from lightning_3d.parallel.tensor.sequence_parallel import scatter_sum


class Region:
    """Tensor-parallel part of a parent module (an attention, an MLP): its collectives at the start
    and at the end.

    Column-parallel siblings that are fed the same tensor share one copy of it, so their input
    gradients are added locally and reduced over the group once. The copy is dropped when all
    siblings have used it, or at the end of the region.

    Args:
        context: the group.
        members: number of column-parallel siblings.
        gathered: the parent gathers its input from parts of the sequence, and its output is split
            again (`GatheredRegion`).
    """

    def __init__(self, context: TensorParallel, members: int, *, gathered: bool = False) -> None:
        self.context = context
        self.members = members
        self.gathered = gathered
        self._outside: Tensor | None = None
        self._inside: Tensor | None = None
        self._with_gradient = False
        self._left = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A copied model has regions of its own, which hold no tensors of this one's graph."""
        copied = memo[id(self)] = Region(self.context, self.members, gathered=self.gathered)
        return copied

    def enter(self, x: Tensor, stream: Stream | None) -> Tensor:
        """Prepare `x` for column-parallel layers.

        `stream` is the one of dropout inside the region; None without dropout, or if nothing in the
        region is sharded.
        """
        if x is not self._outside or self._with_gradient != torch.is_grad_enabled():
            self._outside, self._with_gradient = x, torch.is_grad_enabled()
            self._inside = x if self.gathered else copy_to_region(x, self.context.group, owned=True)
            self._left = self.members
            if stream is not None:
                stream.start()
        inside = self._inside
        assert inside is not None
        self._left -= 1
        if self._left == 0:
            self._forget()
        return inside

    def leave(self, partial: Tensor, stream: Stream | None) -> Tensor:
        """Sum the parts of a row-parallel layer's output; `stream` is the one of dropout behind
        it."""
        self._forget()
        total = (
            scatter_sum(partial, self.context)
            if self.gathered
            else reduce_from_region(partial, self.context.group, owned=True)
        )
        if stream is not None:
            stream.start()
        return total

    def _forget(self) -> None:
        self._outside = self._inside = None


class ColumnParallelLinear(nn.Linear):
    """Linear layer with some rows of the weight: input (..., in) replicated, output (..., out / tp)
    sharded.

    No collective forward; one all-reduce of the input's gradient backward, shared with its
    siblings. Where the parent gathers its input, that is its business.
    """

    tp_region: Region
    tp_stream: Stream | None

    def forward(self, input: Tensor) -> Tensor:
        inside = self.tp_region.enter(input, self.tp_stream)
        gathered = self.tp_region.context.gathered
        if gathered is not None and gathered.whole is inside and self._is_plain(inside):
            return gathered.multiply(self.weight, self.bias)
        return super().forward(inside)

    def _is_plain(self, input: Tensor) -> bool:
        """True if the product is `F.linear` of the arguments, not one in other types."""
        product = getattr(super().forward, "__func__", None)
        return (
            product is nn.Linear.forward
            and input.dtype == self.weight.dtype
            and not torch.is_autocast_enabled(input.device.type)
        )


class GatheredColumnLinear(ColumnParallelLinear):
    """Column parallel inside, output (..., out) replicated: one all-gather forward."""

    tp_sizes: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        return gather_from_region(
            super().forward(input), self.tp_region.context.group, sizes=self.tp_sizes
        )


class VocabParallelHead(ColumnParallelLinear):
    """The output head: `VocabParallelLogits` (..., vocabulary), gathered only when they are read.

    Attributes:
        loss_chunks: see `deferred_logits.deferred`.
    """

    tp_sizes: tuple[int, ...]
    loss_chunks: int | str = 1

    def forward(self, input: Tensor) -> Tensor:
        if self.loss_chunks == 1:
            local = super().forward(input)
        else:
            inside = self.tp_region.enter(input, self.tp_stream)
            local = deferred(
                inside, self.weight, self.bias, self.loss_chunks, columns=max(self.tp_sizes)
            )
        return VocabParallelLogits(local, self.tp_sizes, self.tp_region.context)


class RowParallelLinear(nn.Linear):
    """Linear layer with some columns of the weight: input (..., in / tp) sharded, output (..., out)
    replicated, or a part of the sequence.

    One all-reduce, or one reduce-scatter, forward. The bias, held whole by every rank, is added
    once, after the sum.
    """

    tp_region: Region
    tp_stream: Stream | None

    def forward(self, input: Tensor) -> Tensor:
        total = self.tp_region.leave(self.multiply(input), self.tp_stream)
        return total if self.bias is None else total + self.bias

    def multiply(self, input: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return F.linear(input, self.weight)


class SplitRowLinear(RowParallelLinear):
    """Row parallel inside, input (..., in) replicated: one all-gather of the input's gradient
    backward."""

    tp_sizes: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(
            split_to_region(input, self.tp_region.context.group, sizes=self.tp_sizes)
        )


class ColumnParallelConv1D:
    """Mixin for Transformers' Conv1D with some columns of its weight (in, out): as
    `ColumnParallelLinear`."""

    tp_region: Region
    tp_stream: Stream | None
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.tp_region.enter(x, self.tp_stream), self.weight.t(), self.bias)


class RowParallelConv1D:
    """Mixin for Transformers' Conv1D with some rows of its weight (in, out): as
    `RowParallelLinear`."""

    tp_region: Region
    tp_stream: Stream | None
    weight: nn.Parameter
    bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.tp_region.leave(F.linear(x, self.weight.t()), self.tp_stream) + self.bias


class LatentKeyValueLinear(nn.Linear):
    """The replicated projection to a latent and a rotary key of multi-head latent attention
    (DeepSeek-V2, section 2.1).

    Output (..., latent + rotary). The latent enters the region through the column-parallel layer
    behind it; the last `tp_rotary` columns go straight to this rank's heads, so their gradient is
    summed here: one all-reduce backward.
    """

    tp_context: TensorParallel
    tp_rotary: int

    def forward(self, input: Tensor) -> Tensor:
        latent, rotary = super().forward(input).tensor_split((-self.tp_rotary,), dim=-1)
        return torch.cat([latent, copy_to_region(rotary, self.tp_context.group)], dim=-1)


class VocabParallelEmbedding(nn.Embedding):
    """Embedding with the rows of ids `tp_start` and following: output (..., hidden) replicated by
    one all-reduce forward."""

    tp_context: TensorParallel
    tp_start: int

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = input - self.tp_start
        elsewhere = ((local < 0) | (local >= rows)) & (input >= 0) & (input < self.num_embeddings)
        padding = None if self.padding_idx is None else self.padding_idx - self.tp_start
        if padding is not None and not 0 <= padding < rows:
            padding = None
        # An id that no rank holds is looked up, and raises as it does in an unsharded embedding.
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, padding)
        return reduce_from_region(
            found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp_context.group, owned=True
        )


class HiddenParallelEmbedding(nn.Embedding):
    """Embedding with some columns of every vector: output (..., hidden) replicated by one
    all-gather forward."""

    tp_context: TensorParallel
    tp_sizes: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        return gather_from_region(
            super().forward(input), self.tp_context.group, sizes=self.tp_sizes
        )
