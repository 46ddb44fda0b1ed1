"""Optimizers that shards, stages and closures refuse, with the messages. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_3d.errors import listed
from lightning_3d.layout.layout import Layout

ELEMENTWISE = (
    "AdamW",
    "Adam",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adadelta",
    "Adagrad",
    "ASGD",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Optimizers of torch that update each element of a parameter by itself."""
WHOLE_TENSOR = ("Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Shampoo", "SOAP", "StableAdamW")
"""Optimizers whose update of an element depends on other elements of its tensor."""
_FEW_BITS = {"4bit": (0.5, 128), "8bit": (1.0, 256), "Fp8": (1.0, 256)}
"""Endings of the names of torchao's optimizers with states of few bits: bytes of an element, and
elements with a common float32 scale."""
CPU_ADAM = "DeepSpeedCPUAdam"
"""Can step only weights in host memory."""
CLOSURE = ("LBFGS",)
"""Optimizers that compute the loss several times in a step."""
SPARSE = ("SparseAdam",)
"""Optimizers that take sparse gradients only, which no collective sums."""


def has_few_bits(target: str) -> bool:
    """Return whether a class, `module.name`, is an optimizer of torchao whose states have 4 or 8
    bits."""
    return target.startswith("torchao.") and target.endswith(tuple(_FEW_BITS))


def few_bits_moment(config: Mapping[str, Any]) -> float | None:
    """Return the bytes of one momentum of a parameter, with the scale of its block; None if the
    optimizer has no states of few bits."""
    target = str(config.get("_target_") or "")
    if not has_few_bits(target):
        return None
    code, block = next(sizes for ending, sizes in _FEW_BITS.items() if target.endswith(ending))
    given = config.get("block_size")
    return code + 4 / (given if isinstance(given, int) and given > 0 else block)


def few_bits_refusal(name: str, by: str, layout: Layout) -> str:
    """Message for an optimizer with states of few bits. `by`: what shards them, in this layout."""
    whole = replace(layout, tp=1, ep=1, dp=layout.dp * layout.tp)
    return (
        f"{name} keeps its states in few bits, in blocks of elements with a common scale, which"
        f" {by} would split. Use {whole.name} with zero_stage=0. Or shard the states of AdamW"
        " (zero_stage=1), or keep them in host memory (zero_offload=optimizer)."
    )


def closure_refusal(name: str) -> str:
    """Message for an optimizer that calls the loss itself."""
    return (
        f"{name} computes the loss several times in a step, by a closure, which Lightning3DStrategy"
        " cannot do: gradients are reduced once in each step. Use an optimizer without a closure:"
        f" {listed(ELEMENTWISE, last='or')}."
    )


def sparse_refusal(name: str) -> str:
    """Message for an optimizer that fails in its first step, because gradients are dense."""
    return (
        f"{name} takes sparse gradients only, and those of this strategy are dense. Use an"
        f" optimizer of dense ones: {listed(ELEMENTWISE, last='or')}."
    )


def sharding_refusal(name: str, by: str) -> str:
    """Message for an optimizer that needs whole tensors. `by`: what shards them."""
    whole = " Or use optimizer=muon, which any layout trains." if name == "Muon" else ""
    return (
        f"{name} computes the update of an element from other elements of its tensor. It needs"
        f" whole weight matrices, which {by} would shard. Use an elementwise optimizer"
        f" ({listed(ELEMENTWISE, last='or')}), or a layout without tp and ep and with zero_stage=0."
        + whole
    )


def stages_refusal(name: str, axis: str) -> str:
    """Message for an optimizer that compares tensors with each other. `axis`: gives ranks different
    tensors."""
    return (
        f"{name} computes the update of a tensor from other tensors, for example from a norm over"
        f" all gradients. With {axis}, no rank has all tensors. Use another optimizer"
        f" ({listed(ELEMENTWISE, last='or')}), or a layout without pp, tp and ep and with"
        " zero_stage=0."
    )


def offload_refusal() -> str:
    """Message for Muon with an optimizer step in host memory."""
    return (
        "Muon orthogonalizes matrices on the device, but zero_offload moves the optimizer's step to"
        " host memory. Use zero_offload=none, or another optimizer (optimizer=adamw)."
    )
