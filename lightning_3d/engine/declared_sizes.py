"""Sizes of a model that its layout must divide, read from its configuration."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_3d.layout.layout import Layout
from lightning_3d.layout.model_rules import ModelSizes
from lightning_3d.models.parallel_plan import ParallelPlan
from lightning_3d.models.spec import EXPERT_COUNTS


def declared_sizes(module: nn.Module, plan: ParallelPlan, layout: Layout) -> ModelSizes:
    """Read the sizes of a model; those that its configuration does not have are None.

    Args:
        layout: layout whose stages stand for the number of blocks where the plan does not name
            them.
    """
    return ModelSizes(
        heads=declared_number(module, "num_attention_heads"),
        kv_heads=declared_number(module, "num_key_value_heads"),
        layers=len(plan.blocks_of(module)) if plan.layers else layout.pp * layout.vp,
        vocab=declared_number(module, "vocab_size"),
        experts=declared_number(module, *EXPERT_COUNTS) or _experts_of_layer(module, plan),
    )


def declared_number(module: nn.Module, *names: str) -> int | None:
    """Return the first of these fields of the configuration (of the text part, if it has several)
    that is a whole number."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def _experts_of_layer(module: nn.Module, plan: ParallelPlan) -> int | None:
    """Return the number of experts of a layer, for a configuration that has it under another
    name."""
    found = (getattr(module.get_submodule(name), "num_experts", None) for name in plan.experts)
    return next((count for count in found if isinstance(count, int)), None)
