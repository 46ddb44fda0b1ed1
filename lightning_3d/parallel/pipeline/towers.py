"""Towers that encode images or sounds: models inside the pipelined one that do not contain its
blocks. They are on the first stage."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_3d.compat.transformers import is_transformers_model
from lightning_3d.models.parallel_plan import ParallelPlan

_OF_THE_TEXT = ("mask", "embeds")  # in names of arguments


def has_towers(module: nn.Module, plan: ParallelPlan) -> bool:
    """Return whether some of what the plan runs before the blocks belongs to a tower."""
    towers = [
        f"{name}."
        for name, child in module.named_modules()
        if name and is_transformers_model(child) and not f"{plan.layers}.".startswith(f"{name}.")
    ]
    return any(f"{name}.".startswith(tuple(towers)) for name in plan.before)


def tower_inputs(arguments: dict[str, Any]) -> set[str]:
    """Find the arguments of a model that only its towers read: floating-point tensors that are
    neither masks nor embeddings."""
    return {
        name
        for name, value in arguments.items()
        if _is_signal(value) and not any(word in name for word in _OF_THE_TEXT)
    }


def _is_signal(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_signal, value))
    return isinstance(value, Tensor) and value.is_floating_point()
