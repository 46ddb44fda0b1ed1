"""Check of a prompt against the model that is to continue it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_3d.errors import ConfigError, plural


def max_length(config: Any) -> int | None:
    """Return the number of tokens that a model takes, from its configuration of Transformers; None
    if it does not say it."""
    return getattr(config, "max_position_embeddings", None)


def require_known_ids(prompt: Sequence[int], vocabulary: int, option: str) -> None:
    """Refuse a prompt without tokens, or with ids that the model does not have.

    Args:
        option: the option that names the tokenizer, with an example.

    Raises:
        ConfigError: with the numbers.
    """
    if not prompt or max(prompt) >= vocabulary:
        raise ConfigError(
            f"The tokenizer gives the prompt {plural(len(prompt), 'token')}, with ids up to"
            f" {max(prompt, default=0)}, but the model has ids from 0 to {vocabulary - 1}. Use the"
            f" tokenizer of the model, with {option}."
        )
