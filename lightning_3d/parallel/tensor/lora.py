"""PEFT's LoRA layers on sharded layers: one parallel layer whose region spans the base layer and
the adapters.

    column parallel    base (rows split)     A whole      B (rows split)   input entered once, for both products
    row parallel       base (columns split)  A (columns split)  B whole    both products summed by the one all-reduce

So a block has as many collectives as without adapters. Matrices that are whole have partial
gradients, which are summed once a step (`rewrite.shard_specs`).
"""  # noqa: E501

from __future__ import annotations

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.parallel.random_streams import RandomState, Stream
from lightning_3d.parallel.specialize import combined
from lightning_3d.parallel.tensor.collectives import gather_from_region, split_to_region
from lightning_3d.parallel.tensor.layers import (
    ColumnParallelLinear,
    GatheredColumnLinear,
    Region,
    RowParallelLinear,
    SplitRowLinear,
)


class ColumnParallelLora:
    """Mixin before PEFT's class: input (..., in) replicated, output (..., out / tp) sharded."""

    tp_region: Region
    tp_stream: Stream | None
    tp_adapter_stream: Stream | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inside = self.tp_region.enter(x, self.tp_stream)
        # the input of the adapters' dropout is the same on all ranks
        if self.tp_adapter_stream is not None:
            self.tp_adapter_stream.start()
        output = super().forward(inside, *args, **kwargs)  # type: ignore[misc]
        if self.tp_stream is not None:
            self.tp_stream.start()
        return output


class GatheredColumnLora(ColumnParallelLora):
    """Column parallel inside, output (..., out) replicated."""

    tp_sizes: tuple[int, ...]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return gather_from_region(
            super().forward(x, *args, **kwargs), self.tp_region.context.group, sizes=self.tp_sizes
        )


class RowParallelLora:
    """Mixin before PEFT's class: input (..., in / tp) sharded, output (..., out) replicated. The
    base layer's bias is added once."""

    tp_region: Region
    tp_stream: Stream | None
    bias: Tensor | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        total = self.tp_region.leave(super().forward(x, *args, **kwargs), self.tp_stream)  # type: ignore[misc]
        return total if self.bias is None else total + self.bias


class SplitRowLora(RowParallelLora):
    """Row parallel inside, input (..., in) replicated."""

    tp_sizes: tuple[int, ...]
    tp_adapter_stream: Stream | None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        own = split_to_region(x, self.tp_region.context.group, sizes=self.tp_sizes)
        if self.tp_adapter_stream is not None:
            self.tp_adapter_stream.start()
        return super().forward(own, *args, **kwargs)


class UnbiasedLinear(nn.Linear):
    """The base layer of a row-parallel one: its bias is added by the layer around it."""

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input)

    def multiply(self, input: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return F.linear(input, self.weight)


_LORA = {
    ColumnParallelLinear: ColumnParallelLora,
    GatheredColumnLinear: GatheredColumnLora,
    RowParallelLinear: RowParallelLora,
    SplitRowLinear: SplitRowLora,
}


def become_lora(layer: Any, name: str, kind: type[nn.Module], attributes: dict[str, Any]) -> None:
    """Turn a LoRA layer, whose parameters are shards already, into the counterpart of `kind`, in
    place."""
    own = type(layer)
    layer.__class__ = combined(own.__name__, _LORA[cast(Any, kind)], own)
    stream = _adapter_stream(
        attributes["tp_region"].context.random, name, alike=issubclass(kind, ColumnParallelLinear)
    )
    for key, value in {**attributes, "tp_adapter_stream": stream}.items():
        object.__setattr__(layer, key, value)
    base = layer.base_layer
    if issubclass(kind, RowParallelLinear):
        plain = type(base)
        bases = (UnbiasedLinear,) if plain is nn.Linear else (plain, UnbiasedLinear)
        base.__class__ = combined(plain.__name__, *bases)
    for linear in (base, *layer.lora_A.values(), *layer.lora_B.values()):
        linear.out_features, linear.in_features = linear.weight.shape


def _adapter_stream(random: RandomState | None, name: str, *, alike: bool) -> Stream | None:
    """The stream of dropout on the input of a layer's adapters, which ranks hold alike or not; None
    without dropout."""
    if random is None:
        return None
    adapter = f"{name}.lora_dropout"
    return random.outside(adapter) if alike else random.inside(adapter)
