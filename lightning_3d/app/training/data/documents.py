"""Documents of a packed sample: where they begin, their positions, and their first tokens, which
nothing predicts."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that does not count in the loss, as in torch's cross-entropy and
Transformers."""


def begins_after(input_ids: Tensor, separator: int) -> Tensor:
    """Mark the first token of each document, (seq,) of bool: the first of the sample and those
    behind a separator."""
    begins = torch.ones_like(input_ids, dtype=torch.bool)
    begins[1:] = input_ids[:-1] == separator
    return begins


def restarting_positions(begins: Tensor) -> Tensor:
    """Count the tokens of each document from 0, (seq,) of int64.

    Transformers makes a mask of them that keeps documents apart: a document begins where a position
    does not follow the one before it.

    Args:
        begins: (seq,); True for the first token of each document. The first token of the sample
            must be one.
    """
    places = torch.arange(len(begins))
    return places - torch.where(begins, places, 0).cummax(0).values


def ignore_first_tokens(labels: Tensor, begins: Tensor) -> None:
    """Take the first token of each document, except that of the sample, out of the loss, in place:
    models shift labels by one token."""
    labels[1:][begins[1:]] = IGNORE_INDEX
