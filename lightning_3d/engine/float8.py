"""Linear layers of a model's blocks that multiply in float8, by torchao. Parameters keep their
type.

Inputs, weights (e4m3) and gradients of outputs (e5m2) are cast when they are multiplied. Each
tensor has one scale, taken from its largest element at that moment. (Micikevicius et al., "FP8
Formats for Deep Learning", arXiv:2209.05433.) Scales are powers of two: the shards of a tensor,
which have scales of their own, are then rounded as the whole tensor is, except for elements so
small that they are lost next to its largest one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.options.precision import check_fp8_device, check_fp8_library, fp8_refused
from lightning_3d.parallel.specialize import combined
from lightning_3d.parallel.tensor.layers import (
    ColumnParallelLinear,
    GatheredColumnLinear,
    LatentKeyValueLinear,
    RowParallelLinear,
    SplitRowLinear,
)
from lightning_3d.parallel.tensor.lora import UnbiasedLinear

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

MULTIPLE = 16
"""Dimensions of float8 matrix products are multiples of this (`torch._scaled_mm`)."""

KNOWN_FORWARDS = (
    nn.Linear,
    ColumnParallelLinear,
    GatheredColumnLinear,
    RowParallelLinear,
    SplitRowLinear,
    LatentKeyValueLinear,
    UnbiasedLinear,
)
ROUTERS = ("gate", "router")


def require_fp8(device: torch.device) -> None:
    """Refuse float8 where it does not run.

    Raises:
        ConfigError: there is no GPU, it is too old, or torchao is missing.
    """
    check_fp8_device(
        device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    )
    check_fp8_library()


def multiply_in_float8(blocks: Iterable[nn.Module], *, on: bool) -> None:
    """Let the linear layers of `blocks` multiply in float8, or no longer, in place. Names,
    parameters and hooks stay.

    A layer keeps its type where a dimension of its shard of the weight is not a multiple of 16,
    where its class has a forward of its own, and where it is the router of a mixture of experts. An
    input whose number of rows (tokens) is not a multiple of 16 is multiplied in its own type.

    Args:
        blocks: blocks that this rank has, after their layers were sharded.
        on: whether to multiply in float8.

    Raises:
        ConfigError: no layer of any block can multiply in float8.
    """
    blocks = list(blocks)
    converted = [
        layer for block in blocks for layer in block.modules() if isinstance(layer, _Float8)
    ]
    if not on:
        for layer in converted:
            layer.__class__ = layer.float8_before  # type: ignore[assignment]
        return
    suitable = [layer for block in blocks for layer in _suitable(block)]
    if not suitable and not converted:
        raise fp8_refused(
            "finds no linear layer in blocks of this model whose dimensions are multiples of"
            f" {MULTIPLE}"
        )
    for linear in suitable:
        _convert(linear)


def recipe() -> Float8LinearConfig:
    """Make torchao's configuration of casts."""
    with _unlogged():
        from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(round_scales_to_power_of_2=True)


def _suitable(block: nn.Module) -> Iterator[nn.Linear]:
    for name, layer in block.named_modules():
        if not isinstance(layer, nn.Linear) or isinstance(layer, _Float8):
            continue
        known = any(type(layer).forward is kind.forward for kind in KNOWN_FORWARDS)
        routes = name.rpartition(".")[2] in ROUTERS or "router" in name
        if known and not routes and all(size % MULTIPLE == 0 for size in layer.weight.shape):
            yield layer


class _Float8(nn.Linear):
    """Mixin directly above `nn.Linear`, so that a sharded layer's `super().forward` reaches it.

    Attributes:
        float8_product: torchao's layer with this one's weight, without bias; no submodule, so that
            the weight has one name.
        float8_before: the class without float8.
    """

    float8_product: nn.Module
    float8_before: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:
        if not _divides(input):
            return super().forward(input)
        product = self.float8_product(input)
        return product if self.bias is None else product + self.bias


class _Float8Row(_Float8):
    """Mixin in front of a row-parallel layer, or of one inside a LoRA layer: the bias is added
    after the sum over the ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return super(_Float8, self).forward(input)

    def multiply(self, input: Tensor) -> Tensor:
        return self.float8_product(input) if _divides(input) else F.linear(input, self.weight)


def _divides(input: Tensor) -> bool:
    """Return whether the rows of `input` (..., in) can be multiplied in float8 to make the gradient
    of the weight."""
    return (input.numel() // input.shape[-1]) % MULTIPLE == 0


def _convert(layer: Any) -> None:
    own = type(layer)
    bases = (
        (_Float8Row, own)
        if isinstance(layer, (RowParallelLinear, UnbiasedLinear))
        else (own, _Float8)
    )
    layer.__class__ = _Float8 if own is nn.Linear else combined(own.__name__, *bases)
    object.__setattr__(layer, "float8_product", _product(layer.weight))
    object.__setattr__(layer, "float8_before", own)


def _product(weight: nn.Parameter) -> nn.Module:
    """Make torchao's layer around a weight."""
    with _unlogged():
        from torchao.float8 import convert_to_float8_training
    plain = nn.Linear(
        weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype
    )
    plain.weight = weight
    return convert_to_float8_training(nn.Sequential(plain), config=recipe())[0]


@contextmanager
def _unlogged() -> Iterator[None]:
    """Suppress the warnings of importing torchao (0.18) about extensions that do not load and are
    not needed here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
