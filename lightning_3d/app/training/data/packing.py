"""Packing of tokenized documents into samples of equal length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_3d.app.training.data.concatenation import Concatenation, first_held_out
from lightning_3d.app.training.data.documents import (
    begins_after,
    ignore_first_tokens,
    restarting_positions,
)
from lightning_3d.errors import DataError
from lightning_3d.storage.piece_cache import Piece, PieceCache, fetch_together

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Tokens:
    """A sequence of tokens: documents one after the other, each followed by a separator or listed
    in an index.

    Attributes:
        values: (tokens,) of an integer type; an array in memory, a memory-mapped file, or several
            files.
        name: source of the tokens, for messages.
        separator: token at the end of each document; None if documents are not marked, or only by
            the index of their files.
        first: position of `values[0]` in the source, for messages.
        largest: largest id of the source; None if it is not known.
    """

    values: np.ndarray | Concatenation
    name: str
    separator: int | None = None
    first: int = 0
    largest: int | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def cache(self) -> PieceCache | None:
        """The cache of remote data through which they are read: reading all of them would fetch
        them. None: they are on the disk."""
        return self.values.cache if isinstance(self.values, Concatenation) else None

    def begins(self, start: int, input_ids: Tensor) -> Tensor | None:
        """Mark the first token of each document of a sample, (sequence,) of bool. None: documents
        are not marked.

        Args:
            start: place of the sample in the tokens.
            input_ids: (sequence,), the sample.
        """
        if self.separator is not None:
            return begins_after(input_ids, self.separator)
        if not isinstance(self.values, Concatenation) or not self.values.has_ends:
            return None
        begins = torch.from_numpy(self.values[start : start + len(input_ids)].begins())
        begins[0] = True
        return begins

    def part(self, start: int, stop: int) -> Tokens:
        return Tokens(
            self.values[start:stop], self.name, self.separator, self.first + start, self.largest
        )

    def hold_out(self, fraction: float, sequence_length: int) -> tuple[Tokens, Tokens | None]:
        """Split into (training, held-out): the last samples are held out, at least one; None if
        `fraction` is 0."""
        if fraction == 0:
            return self, None
        first = first_held_out(len(self) // sequence_length, fraction) * sequence_length
        return self.part(0, first), self.part(first, len(self))

    def check_vocabulary(self, vocab_size: int, start: int = 0, stop: int | None = None) -> None:
        """Refuse token ids outside the model's vocabulary.

        Raises:
            DataError: names the first such id and its position.
        """
        stop = len(self.values) if stop is None else stop
        for begin in range(start, stop, _CHUNK):
            chunk = np.asarray(self.values[begin : min(begin + _CHUNK, stop)])
            outside = chunk >= vocab_size
            if chunk.dtype.kind == "i":
                outside |= chunk < 0
            if outside.any():
                place = int(np.argmax(outside))
                self._refuse(
                    int(chunk[place]),
                    f" at position {self.first + begin + place}",
                    vocab_size,
                    start,
                    stop,
                )

    def check_largest(self, vocab_size: int) -> None:
        """Refuse a source whose largest id, which must be known, is outside the model's vocabulary.
        Reads no tokens.

        Raises:
            DataError: names the id.
        """
        if self.largest is not None and self.largest >= vocab_size:
            self._refuse(self.largest, "", vocab_size, 0, 0)

    def _refuse(self, token: int, where: str, vocab_size: int, start: int, stop: int) -> None:
        largest = max(
            [token, *np.asarray(self.values[start:stop]).max(initial=0, keepdims=True).tolist()]
        )
        raise DataError(
            f"Token {token}{where} of {self.name} is outside the model's vocabulary of {vocab_size}"
            f" (ids 0 to {vocab_size - 1}). Use a model whose vocab_size is at least {largest + 1},"
            " or the tokenizer that belongs to this model."
        )


def join_documents(documents: Iterable[np.ndarray], separator: int) -> np.ndarray:
    """Concatenate documents, with a separator after each.

    Args:
        documents: arrays of token ids; empty ones are left out.

    Returns:
        (tokens,) of uint16 where all ids fit, else uint32.
    """
    kept = [document for document in documents if len(document)]
    largest = max([separator, *(int(document.max()) for document in kept)])
    joined = np.empty(sum(len(document) + 1 for document in kept), dtype=smallest_dtype(largest))
    end = 0
    for document in kept:
        joined[end : end + len(document)] = document
        end += len(document) + 1
        joined[end - 1] = separator
    return joined


def smallest_dtype(largest_id: int) -> np.dtype:
    """Choose the smaller of the two dtypes of token files that holds this id."""
    return np.dtype(np.uint16 if largest_id < 1 << 16 else np.uint32)


class Samples(Dataset[dict[str, Tensor]]):
    """Samples of equal length."""

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def cache(self) -> PieceCache | None:
        """The cache of remote data through which samples are read; None if all of them are on the
        disk."""
        return None

    def pieces(self, index: int) -> list[Piece]:
        """Return the pieces of the cache of remote data that a sample is in; none for data on the
        disk."""
        return []

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Read the samples of a batch, whose missing pieces are fetched at the same time. The data
        loader of torch calls this."""
        fetch_together([piece for index in indices for piece in self.pieces(index)])
        return [self[index] for index in indices]


class PackedDataset(Samples):
    """Consecutive samples of `sequence_length` tokens, without gaps or overlap.

    A sample is `{"input_ids": (sequence,), "labels": (sequence,)}` of int64, in the convention of
    Transformers: labels equal the inputs, and the model shifts them. A sample may contain the end
    of one document and the start of the next; attention crosses that border, unless there is a
    document mask. The separator is a target like any other, so the model learns where documents
    end. By default the first token after it is a target too, because the separator also marks the
    start of a document. An incomplete last sample is left out.

    With a document mask, a sample also has `"position_ids": (sequence,)`, which restart at 0 with
    each document. A document that a sample cuts is one document in each of the samples.

    Args:
        tokens: the tokens.
        sequence_length: tokens per sample.
        vocab_size: vocabulary size of the model; each sample is checked when it is read. None: no
            check.
        predict_across_documents: False gives the first token after a separator the label -100,
            because its context belongs to another document.
        document_mask: add `position_ids` that keep documents apart. Implies that
            `predict_across_documents` is False.
        samples: indices of samples to use, in this order; None for all.
    """

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        *,
        vocab_size: int | None = None,
        predict_across_documents: bool = True,
        document_mask: bool = False,
        samples: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._predicts_across = predict_across_documents and not document_mask
        self._document_mask = document_mask
        self._samples = range(len(tokens) // sequence_length) if samples is None else samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self._samples[index]) * self.sequence_length
        input_ids = self._read(start, start + self.sequence_length)
        sample = {"input_ids": input_ids, "labels": input_ids.clone()}
        begins = self._begins(input_ids, start)
        if begins is not None:
            self._separate(sample, begins)
        elif self._document_mask:
            raise DataError(
                f"data.document_mask=true needs the ends of documents, and {self.tokens.name} does"
                " not say them."
            )
        return sample

    @property
    @override
    def cache(self) -> PieceCache | None:
        return self.tokens.cache

    @override
    def pieces(self, index: int) -> list[Piece]:
        values = self.tokens.values
        if not isinstance(values, Concatenation):
            return []
        start = int(self._samples[index]) * self.sequence_length
        return values[start : start + self.sequence_length].pieces()

    def _read(self, start: int, stop: int) -> Tensor:
        """Read tokens as int64, and check their ids."""
        if self._vocab_size is not None:
            self.tokens.check_vocabulary(self._vocab_size, start, stop)
        return torch.from_numpy(np.asarray(self.tokens.values[start:stop]).astype(np.int64))

    def _begins(self, input_ids: Tensor, start: int) -> Tensor | None:
        """Mark the first token of each document of a sample, (sequence,) of bool. None: documents
        are not marked.

        Args:
            start: place of the sample in the tokens.
        """
        return self.tokens.begins(start, input_ids)

    def _separate(self, sample: dict[str, Tensor], begins: Tensor) -> None:
        """Add to a sample what its documents change."""
        if not self._predicts_across:
            ignore_first_tokens(sample["labels"], begins)
        if self._document_mask:
            sample["position_ids"] = restarting_positions(begins)


def spread(available: int, wanted: int | None) -> Sequence[int] | np.ndarray:
    """Choose `wanted` samples, spread evenly over `available` ones (all if None or if there are
    fewer)."""
    if wanted is None or wanted >= available:
        return range(available)
    return np.arange(wanted) * available // wanted
