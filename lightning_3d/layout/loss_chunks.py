"""The parts in which the loss of a micro-batch is computed. Pure: no torch."""

from __future__ import annotations

from lightning_3d.errors import ConfigError

AUTO = "auto"
MOST_CHUNKS = 8
LARGE_CHUNK = 2**26
"""Bytes of float32 logits in a part of the loss, from which on "auto" makes more parts."""


def check_loss_chunks(chunks: int | str) -> None:
    """Refuse what is no number of parts of the loss.

    Raises:
        ConfigError: it is neither "auto" nor a whole number from 1 on.
    """
    if chunks != AUTO and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise ConfigError(f"loss_chunks must be auto or a whole number of at least 1 (1 computes the loss at once); got {chunks!r}.")


def count_chunks(chunks: int | str, tokens: int, vocabulary: int) -> int:
    """Return the number of parts in which the loss of so many tokens is computed, at most one for each token.

    Args:
        chunks: "auto": 8, or fewer where the logits are small; or a number.
        tokens: of a micro-batch on this rank.
        vocabulary: logits of a token on this rank.
    """
    wanted = min(MOST_CHUNKS, -(-tokens * vocabulary * 4 // LARGE_CHUNK)) if chunks == AUTO else int(chunks)
    return max(1, min(wanted, tokens))
