"""Arguments of a call of a model whose sequences several ranks share."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError, PlanError

_REFUSED = ("past_key_values", "cache", "cache_params", "state", "use_cache", "output_attentions")


def named_arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name all arguments, and turn off the cache.

    Transformers keeps packed documents apart by their positions only in calls that have neither a
    mask nor a cache, not even an empty one. A call that would have made a cache gets a mask of
    ones, so that turning the cache off does not change what tokens see.
    """
    signature = inspect.signature(forward)
    named = signature.bind_partial(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    if (
        _makes_cache(forward, signature, named)
        and named.get("attention_mask") is None
        and "attention_mask" in signature.parameters
    ):
        positions = named.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim == 2:
            tokens = tokens_of(named)
            named["attention_mask"] = torch.ones(
                tokens.shape[:2], dtype=torch.long, device=tokens.device
            )
    if "use_cache" in signature.parameters and not named.get("use_cache"):
        named["use_cache"] = False
    return named


def _makes_cache(forward: Any, signature: inspect.Signature, named: dict[str, Any]) -> bool:
    """Return whether a call of a model of Transformers would make a cache, as
    `merge_with_config_defaults` decides."""
    model = getattr(forward, "__self__", None)
    if (
        not isinstance(model, nn.Module)
        or "use_cache" not in signature.parameters
        or named.get("use_cache") is not None
    ):
        return False
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not getattr(text, "use_cache", False):
        return False
    trains = model.training and torch.is_grad_enabled()
    return not trains or not any(
        getattr(part, "gradient_checkpointing", False) for part in model.modules()
    )


def tokens_of(arguments: dict[str, Any]) -> Tensor:
    """Find the tokens, (batch, sequence) or (batch, sequence, hidden).

    Raises:
        PlanError: there are none.
    """
    tokens = next(
        (
            arguments[name]
            for name in ("input_ids", "inputs_embeds")
            if arguments.get(name) is not None
        ),
        None,
    )
    if tokens is None:
        raise PlanError(
            "With context parallelism (cp) the model must be called with input_ids or"
            " inputs_embeds."
        )
    return tokens


def splits(arguments: dict[str, Any], ranks: int) -> bool:
    """Return whether so many ranks can split the sequences of a call of a causal language model
    that returns logits and hidden states."""
    tokens = next(
        (
            arguments[name]
            for name in ("input_ids", "inputs_embeds")
            if isinstance(arguments.get(name), Tensor)
        ),
        None,
    )
    if (
        tokens is None
        or tokens.shape[1] % (2 * ranks)
        or any(arguments.get(name) for name in (*_REFUSED, "output_router_logits"))
    ):
        return False
    # the loss would be that of this rank's tokens
    if any(arguments.get(name) is not None for name in ("labels", "shift_labels")):
        return False
    keep, mask = arguments.get("logits_to_keep"), arguments.get("attention_mask")
    return (
        not isinstance(keep, Tensor)
        and not keep
        and (mask is None or isinstance(mask, Tensor) and mask.ndim == 2)
    )


def refuse_arguments(arguments: dict[str, Any], *more: str) -> None:
    """Refuse arguments that concern tokens of other ranks, and `more` of them.

    Raises:
        ConfigError: names one of them.
    """
    for name in (*_REFUSED, *more):
        if arguments.get(name):
            raise ConfigError(
                f"The model was called with {name}, which context parallelism (cp) does not"
                " support. Leave it out."
            )
