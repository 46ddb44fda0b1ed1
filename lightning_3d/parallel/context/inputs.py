"""Arguments of a call of a model whose sequences several ranks share."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from lightning_3d.errors import ConfigError, PlanError

_REFUSED = ("past_key_values", "cache", "cache_params", "state", "use_cache", "output_attentions")


def named_arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name all arguments, and turn off the cache."""
    signature = inspect.signature(forward)
    named = signature.bind_partial(*args, **kwargs).arguments
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name, {})
    if "use_cache" in signature.parameters and not named.get("use_cache"):
        named["use_cache"] = False
    return named


def tokens_of(arguments: dict[str, Any]) -> Tensor:
    """Find the tokens, (batch, sequence) or (batch, sequence, hidden).

    Raises:
        PlanError: there are none.
    """
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None), None)
    if tokens is None:
        raise PlanError("With context parallelism (cp) the model must be called with input_ids or inputs_embeds.")
    return tokens


def splits(arguments: dict[str, Any], ranks: int) -> bool:
    """Return whether so many ranks can split the sequences of a call of a causal language model that returns logits and hidden states."""
    tokens = next((arguments[name] for name in ("input_ids", "inputs_embeds") if isinstance(arguments.get(name), Tensor)), None)
    if tokens is None or tokens.shape[1] % (2 * ranks) or any(arguments.get(name) for name in (*_REFUSED, "output_router_logits")):
        return False
    if any(arguments.get(name) is not None for name in ("labels", "shift_labels")):  # the loss would be that of this rank's tokens
        return False
    keep, mask = arguments.get("logits_to_keep"), arguments.get("attention_mask")
    return not isinstance(keep, Tensor) and not keep and (mask is None or isinstance(mask, Tensor) and mask.ndim == 2)


def refuse_arguments(arguments: dict[str, Any], *more: str) -> None:
    """Refuse arguments that concern tokens of other ranks, and `more` of them.

    Raises:
        ConfigError: names one of them.
    """
    for name in (*_REFUSED, *more):
        if arguments.get(name):
            raise ConfigError(f"The model was called with {name}, which context parallelism (cp) does not support. Leave it out.")
