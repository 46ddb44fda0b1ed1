"""The parts in which the loss of a micro-batch is computed. Pure: no torch."""

from __future__ import annotations

from lightning_3d.errors import ConfigError

AUTO = "auto"
MOST_CHUNKS = 8
LARGE_CHUNK = 2**26
"""Bytes of float32 logits in a part of the loss, from which on "auto" makes more parts."""
_LOGIT, _OF_WEIGHT = 10, 6
"""Bytes of a logit in 16 bits with its copy in float32 and its gradient; and of the gradient of an element of the weight: its sum in
float32, and in 16 bits until the backward."""


def check_loss_chunks(chunks: int | str) -> None:
    """Refuse a value of `loss_chunks` that cannot be used.

    Raises:
        ConfigError: it is neither "auto" nor a whole number from 1 on.
    """
    if chunks != AUTO and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise ConfigError(f"loss_chunks must be auto or a whole number of at least 1 (1 computes the loss at once); got {chunks!r}.")


def count_chunks(chunks: int | str, tokens: int, vocabulary: int, hidden: int) -> int:
    """Return the number of parts in which the loss of so many tokens is computed, at most one for each token.

    Args:
        chunks: "auto": 8, or fewer where the logits are small, and 1 where the gradient of the head's weight, which is added up in float32,
            needs more memory than the chunks save; or a number.
        tokens: of a micro-batch on this rank.
        vocabulary: logits of a token on this rank.
        hidden: size of the hidden states.
    """
    if chunks != AUTO:
        return max(1, min(int(chunks), tokens))
    wanted = min(MOST_CHUNKS, -(-tokens * vocabulary * 4 // LARGE_CHUNK), tokens)
    pays = wanted > 1 and _LOGIT * tokens * (1 - 1 / wanted) > _OF_WEIGHT * hidden
    return wanted if pays else 1
