"""Checks of models for context parallelism."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from lightning_3d.errors import PlanError
from lightning_3d.models.context_limits import check_fields
from lightning_3d.parallel.context.attention import NAME

RECURRENT = ("mamba", "recurrent", "rwkv", "deltanet", "linearattention", "lightningattention", "shortconv", "hyena")


def require_replaceable(module: nn.Module, blocks: list[nn.Module]) -> None:
    """Make the model call our attention, or refuse it by name.

    Raises:
        PlanError: its attention cannot be replaced, or something else in it mixes tokens.
        ConfigError: one of its options is not supported.
    """
    name = type(module).__name__
    config: Any = getattr(module, "config", None)
    choose = getattr(module, "set_attn_implementation", None)
    if choose is None or config is None:
        raise PlanError(
            f"Context parallelism (cp) replaces the attention of Transformers models, and {name} is not one. Use cp=1, or write the model's"
            " attention with Transformers' AttentionInterface."
        )
    check_fields(name, lambda key: getattr(config, key, None))
    reason = _what_else(module, config, blocks)
    if reason:
        raise PlanError(f"Context parallelism (cp) cannot shard the sequences of {name}: {reason}. Use cp=1.")
    _replace(module, name, choose)


def _replace(module: nn.Module, name: str, choose: Any) -> None:
    inside = {id(found): found for child in module.modules() if (found := getattr(child, "config", None)) is not None}
    choose(NAME)
    if any(getattr(found, "_attn_implementation", NAME) != NAME for found in inside.values()):
        raise PlanError(
            f"Context parallelism (cp) cannot replace the attention of {name}, which does not use Transformers' attention interface"
            " (AttentionInterface). Use cp=1."
        )


def _what_else(module: nn.Module, config: Any, blocks: list[nn.Module]) -> str:
    """The part of a model, other than its attention, that mixes tokens; empty if there is none."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters or all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "its forward takes no position_ids, or no **kwargs for its loss function"
    if text is not config or getattr(config, "is_encoder_decoder", False):
        return "it has inputs other than one sequence of tokens"
    if not _is_language_model(module):
        return "its head is not one of a causal language model"
    for block in blocks:
        for child in block.modules():
            kind = type(child).__name__.lower()
            if isinstance(child, (nn.Conv1d, nn.RNNBase)) or any(word in kind for word in RECURRENT):
                return f"its blocks mix tokens in {type(child).__name__}"
    return ""


def _is_language_model(module: nn.Module) -> bool:
    """A causal language model, or one without a head."""
    outputs = getattr(module, "get_output_embeddings", None)
    has_head = outputs is not None and outputs() is not None
    return has_head or getattr(module, "base_model", None) is module
