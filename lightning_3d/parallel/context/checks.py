"""Checks of models for context parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_3d.compat.transformers import is_transposed_linear
from lightning_3d.compat.transformers_attention import INTERFACE, own_attention, uses
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.models.context_limits import attends_plainly, check_fields, why_not_by_attention
from lightning_3d.parallel.context.attention import NAME
from lightning_3d.parallel.context.kernels import choose_kernels
from lightning_3d.parallel.trials.tokens import treats_tokens_separately


def replace_attention(module: nn.Module, blocks: list[nn.Module]) -> bool:
    """Make the model call our attention, if nothing else in it looks at several tokens. Returns
    whether it does.

    Raises:
        PlanError: not a model of Transformers.
        ConfigError: one of its options is not supported.
    """
    name = type(module).__name__
    config: Any = getattr(module, "config", None)
    if getattr(module, "set_attn_implementation", None) is None or config is None:
        raise PlanError(
            f"Context parallelism (cp) replaces the attention of Transformers models, and {name} is"
            " not one. Use cp=1, or write the model's attention with Transformers'"
            " AttentionInterface."
        )

    def read(key: str) -> Any:
        return getattr(config, key, None)

    check_fields(name, read)
    return (
        not why_not_by_attention(read)
        and _mixes_by_attention(module, config, blocks)
        and _replace(module)
    )


def mixes_by_attention(module: nn.Module, blocks: list[nn.Module]) -> bool:
    """Return whether nothing but attention that `replace_attention` can replace mixes tokens in a
    causal language model with its head."""
    config: Any = getattr(module, "config", None)
    generates: Any = getattr(module, "can_generate", None)
    head: Any = getattr(module, "get_output_embeddings", None)
    if generates is None or head is None or not generates() or head() is None:
        return False

    def read(key: str) -> Any:
        return getattr(config, key, None)

    try:
        check_fields(type(module).__name__, read)
    except ConfigError:
        return False
    return not why_not_by_attention(read) and _mixes_by_attention(module, config, blocks)


def replace_some_attention(module: nn.Module, mixing: list[nn.Module]) -> list[nn.Module]:
    """Make those modules of a model call our attention in which nothing else mixes tokens, and
    return them. None: nothing is changed.

    Args:
        mixing: the modules that mix tokens.
    """
    config: Any = module.config

    def read(key: str) -> Any:
        return getattr(config, key, None)

    # Models that may attend to another sequence make masks for it, too.
    one_sequence = (
        config.get_text_config() is config
        and "encoder_hidden_states" not in inspect.signature(module.forward).parameters
    )
    found = [part for part in mixing if _only_attends(part)]
    plain = attends_plainly(read) and not any(
        _attends_otherwise(child) for part in mixing for child in part.modules()
    )
    return found if found and one_sequence and plain and _replace(module) else []


def _only_attends(module: nn.Module) -> bool:
    """Return whether a module calls Transformers' attention interface, and has only linear layers
    and norms besides."""
    inside = [
        child
        for child in module.modules()
        if child is not module and any(True for _ in child.parameters(recurse=False))
    ]
    plain = all(
        isinstance(child, nn.Linear)
        or is_transposed_linear(child)
        or "Norm" in type(child).__name__
        for child in inside
    )
    return plain and uses(module, INTERFACE) and not _counts_tokens(module)


def _attends_otherwise(module: nn.Module) -> bool:
    """Return whether a module attends through the interface otherwise than our attention does,
    which must not replace it."""
    return uses(module, INTERFACE) and bool(own_attention(module))


def _counts_tokens(module: nn.Module) -> bool:
    """Return whether a module derives positions from the number of tokens that it gets, as Llama
    4's scale of queries."""
    return uses(module, "arange", "cumsum")


def _replace(module: nn.Module) -> bool:
    """Choose our attention in all configurations of a model, with its kernels; False, and nothing
    changed, where one does not take it."""
    before = set_attention(module)
    for _, implementation in before or ():
        choose_kernels(implementation)
    return before is not None


def set_attention(module: Any) -> list[tuple[Any, str]] | None:
    """Choose our attention in all configurations of a model.

    Returns:
        The configurations, each with the attention that it had; None, and nothing changed, where
        one does not take ours.
    """
    found = {
        id(config): config
        for child in module.modules()
        if (config := getattr(child, "config", None)) is not None
    }
    before = [
        (config, config._attn_implementation)
        for config in found.values()
        if hasattr(config, "_attn_implementation")
    ]
    module.set_attn_implementation(NAME)
    if all(config._attn_implementation == NAME for config, _ in before):
        return before
    for config, implementation in before:
        config._attn_implementation = implementation
    return None


def _mixes_by_attention(module: nn.Module, config: Any, blocks: list[nn.Module]) -> bool:
    """Return whether a causal language model takes positions and arguments of the loss, and nothing
    else in it seems to mix tokens."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parameters = inspect.signature(module.forward).parameters
    if "position_ids" not in parameters or all(
        parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()
    ):
        return False
    if (
        text is not config
        or getattr(config, "is_encoder_decoder", False)
        or not _is_language_model(module)
    ):
        return False
    if not all(any(uses(child, INTERFACE) for child in block.modules()) for block in blocks):
        return False  # the user's own attention may be in one of them
    if not all(
        treats_tokens_separately(part, text.hidden_size)
        for block in blocks
        for part in _beside_attention(block)
    ):
        return False
    inside = [child for block in blocks for child in block.modules()]
    if any(
        _attends_otherwise(child) or uses(child, INTERFACE) and _counts_tokens(child)
        for child in inside
    ):
        return False
    # in an attention, too
    return not any(isinstance(child, (nn.Conv1d, nn.RNNBase)) for child in inside)


def _beside_attention(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules in a block that neither call Transformers' attention interface nor
    contain what does."""
    for child in module.children():
        if uses(child, INTERFACE):
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or any(
            uses(inner, INTERFACE) for inner in child.modules()
        ):
            yield from _beside_attention(child)
        else:
            yield child


def _is_language_model(module: nn.Module) -> bool:
    """A causal language model, or one without a head."""
    outputs = getattr(module, "get_output_embeddings", None)
    has_head = outputs is not None and outputs() is not None
    return has_head or getattr(module, "base_model", None) is module
