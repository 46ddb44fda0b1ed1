"""The parts in which the loss of a micro-batch is computed. Pure: no torch."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

AUTO = "auto"
MOST_CHUNKS = 8
LARGE_CHUNK = 2**26
"""Bytes of float32 logits in a part of the loss, from which on "auto" makes more parts."""
_LOGIT, _SUM = 10, 4
"""Bytes of a logit in 16 bits with its copy in float32 and its gradient; and of an element of the
weight's gradient, while it adds up in float32."""
_IN_CACHE = 2**22
"""Logits of a piece on a CPU at the most: in float32 they fit its cache, and its allocator keeps
their memory."""


def count_chunks(chunks: int | str, tokens: int, vocabulary: int, hidden: int, width: int) -> int:
    """Return the number of chunks in which the loss of so many tokens is computed, at most one for
    each token.

    Args:
        chunks: "auto": 8, or fewer where the logits are small. Where the gradient of the head's
            weight would need more memory than these save: as many as need one product, whose result
            is not added up in float32, or 1; or a number.
        tokens: of a micro-batch on this rank.
        vocabulary: logits of a token on this rank.
        hidden: size of the hidden states.
        width: bytes of a number of the logits as the head computes them.
    """
    if chunks != AUTO:
        return max(1, min(int(chunks), tokens))
    wanted = min(MOST_CHUNKS, -(-tokens * vocabulary * 4 // LARGE_CHUNK), tokens)
    of_one_product = 2 * max(4, width) // width
    return next(
        (
            count
            for count in (wanted, min(wanted, of_one_product))
            if _saves(count, tokens, hidden, width)
        ),
        1,
    )


def _saves(chunks: int, tokens: int, hidden: int, width: int) -> bool:
    """True if the chunks save more memory of logits than they keep of the gradient of the head's
    weight."""
    of_weight = width + (_SUM if width < _SUM and count_products(chunks, width) > 1 else 0)
    return chunks > 1 and _LOGIT * tokens * (1 - 1 / chunks) > of_weight * hidden


class LossRows(NamedTuple):
    """Rows of a micro-batch's logits that are computed together.

    Attributes:
        product: of one product with the head's weight. Each product but the only one is added to a
            gradient of the weight in float32, so there are few. Its logits stay until their
            gradient has taken their place.
        piece: whose loss is computed at once, with copies in float32 and gradients.
    """

    product: int
    piece: int


def rows_of_parts(chunks: int, tokens: int, columns: int, width: int, *, on_cpu: bool) -> LossRows:
    """Return the largest products and pieces whose tensors take 1/`chunks` of the memory that the
    loss of all tokens takes at once.

    The loss keeps three numbers for each logit, in float32 or wider. Two thirds of the memory go to
    the product.

    Args:
        chunks: from `count_chunks`; at least 2.
        tokens, columns: of the logits; columns of the rank that has most.
        width: bytes of a number of the product.
        on_cpu: whether a piece is to fit a processor's cache.
    """
    whole = 3 * max(4, width)
    product = ceil(tokens / count_products(chunks, width))
    piece = max(1, int(tokens / chunks - product * width / whole))
    return LossRows(product, min(piece, max(1, _IN_CACHE // columns)) if on_cpu else piece)


def count_products(chunks: int, width: int) -> int:
    """Return the number of products with the head's weight in which a loss in so many chunks is
    computed.

    Args:
        width: bytes of a number of the product.
    """
    return ceil(chunks * width / (2 * max(4, width)))
