"""Whole documents in samples of equal length, with padding behind them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_3d.app.training.data.base import PackedDataModule
from lightning_3d.app.training.data.documents import IGNORE_INDEX
from lightning_3d.app.training.data.packing import PackedDataset, Tokens, spread
from lightning_3d.app.training.data.permutation import Permutation

TARGET, BEGINS, PADDING = 1, 2, 4
"""Marks of a token, which add up: it is a target, it begins a document or the padding, it is
padding."""

Document = tuple[np.ndarray, np.ndarray]
"""Ids of a document, and the marks of each."""


class PaddedDataModule(PackedDataModule):
    """A data module whose samples may consist of whole documents and padding.

    The sample that holds a document depends only on the data; the order of samples on the seed and
    the global batch.

    Args:
        **kwargs: see `PackedDataModule`.
    """

    packing: str | None = None
    """Which documents share a sample, `best_fit`; None: samples are consecutive tokens, without
    padding."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._marks: dict[str, np.ndarray] = {}

    @override
    def _pack(self, tokens: Tokens, wanted: int | None) -> PackedDataset:
        if self.packing is None:
            return super()._pack(tokens, wanted)
        return PaddedDataset(
            tokens,
            self._marks[tokens.name][tokens.first : tokens.first + len(tokens)],
            self.sequence_length,
            vocab_size=self.vocab_size,
            predict_across_documents=self.predict_across_documents,
            document_mask=self.document_mask,
            samples=spread(len(tokens) // self.sequence_length, wanted),
        )

    @override
    def setup(self, stage: str | None = None) -> None:
        first = self.train_set is None
        super().setup(stage)
        if first:
            self._report_padding()

    @rank_zero_only
    def _report_padding(self) -> None:
        """Print the share of padding, which every rank could compute, on one."""
        share = self.padding_share()
        if share is not None:
            print(
                f"lightning_3d: {100 * share:.2f} % of the tokens of samples are padding",
                file=sys.stderr,
            )

    def padding_share(self) -> float | None:
        """Share of the tokens of all samples to train on that are padding; None without a packing.
        Reads the mark of every token."""
        return self.train_set.padding_share() if isinstance(self.train_set, PaddedDataset) else None

    @override
    def _order_depends_on(self) -> dict[str, Any]:
        return {**super()._order_depends_on(), "packing": self.packing}


class PaddedDataset(PackedDataset):
    """Samples in which only some tokens are targets; the labels of the others are -100.

    Args:
        marks: (tokens,); sums of `TARGET`, `BEGINS` and `PADDING`.
        **kwargs: see `PackedDataset`.
    """

    def __init__(
        self, tokens: Tokens, marks: np.ndarray, sequence_length: int, **kwargs: Any
    ) -> None:
        super().__init__(tokens, sequence_length, **kwargs)
        self._marks = marks

    def padding_share(self) -> float:
        """Share of all tokens that are padding."""
        return float(np.count_nonzero(self._marks & PADDING)) / max(1, len(self._marks))

    def without_padding(self, count: int) -> np.ndarray:
        """Return the first `count` tokens, except those that are padding."""
        return np.asarray(self.tokens.values[:count])[self._marks[:count] & PADDING == 0]

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        start = int(self._samples[index]) * self.sequence_length
        sample["labels"][~self._marked(TARGET, start)] = IGNORE_INDEX
        return sample

    @override
    def _begins(self, input_ids: Tensor, start: int) -> Tensor | None:
        return self._marked(BEGINS, start)

    def _marked(self, mark: int, start: int) -> Tensor:
        """Tokens of a sample that have a mark, (sequence,) of bool."""
        return torch.from_numpy(self._marks[start : start + self.sequence_length] & mark != 0)


def split_documents(tokens: np.ndarray, separator: int, longest: int) -> list[np.ndarray]:
    """Split tokens into documents, each with the separator at its end. A longer document becomes
    several of at most `longest` tokens."""
    ends = (np.flatnonzero(tokens == separator) + 1).tolist()
    if len(tokens) and (not ends or ends[-1] != len(tokens)):
        ends.append(len(tokens))
    starts = [0, *ends][: len(ends)]
    places = (
        (first, min(first + longest, end))
        for start, end in zip(starts, ends, strict=True)
        for first in range(start, end, longest)
    )
    return [tokens[first:stop] for first, stop in places]


def mark_targets(documents: Sequence[np.ndarray]) -> list[Document]:
    """Mark all tokens of documents as targets."""
    marks = np.full(max(map(len, documents), default=1), TARGET, dtype=np.uint16)
    marks[0] |= BEGINS
    # one array, of which each document has a view of the beginning
    return [(ids, marks[: len(ids)]) for ids in documents]


def pack(
    documents: Sequence[Document], length: int, padding: int, dtype: Any = np.uint32
) -> tuple[np.ndarray, np.ndarray]:
    """Put documents into samples.

    Args:
        documents: of at most `length` tokens each.
        padding: id of padding.
        dtype: type of the ids.

    Returns:
        (tokens, marks), both (samples * length,).
    """
    samples = best_fit([len(ids) for ids, _ in documents], length)
    # Without this shuffling, the last samples, which may be held out, would be those of the
    # shortest documents.
    samples = [
        samples[place] for place in Permutation(len(samples), 0, 0).follow(range(len(samples)))
    ]
    return lay_out(documents, samples, length, padding, dtype)


def lay_out(
    documents: Sequence[Document],
    samples: Sequence[Sequence[int]],
    length: int,
    padding: int,
    dtype: Any = np.uint32,
) -> tuple[np.ndarray, np.ndarray]:
    """Write the documents of each sample one after the other, and padding behind them; see `pack`.

    Args:
        samples: documents of each sample.
    """
    tokens = np.full((len(samples), length), padding, dtype=dtype)
    marks = np.full((len(samples), length), PADDING, dtype=np.uint16)
    for row, sample in enumerate(samples):
        start = 0
        for ids, which in (documents[place] for place in sample):
            tokens[row, start : start + len(ids)] = ids
            marks[row, start : start + len(ids)] = which
            start += len(ids)
        if start < length:
            marks[row, start] |= BEGINS
    return tokens.reshape(-1), marks.reshape(-1)


# Which whole documents share a sample.


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each document, the longest first, into the fullest sample that has room, or into a new
    one (best-fit decreasing).

    It needs at most 11/9 of the least possible number of samples, plus 4 (Johnson, Demers, Ullman,
    Garey and Graham, "Worst-case performance bounds for simple one-dimensional packing algorithms",
    1974). Memory is proportional to the number of documents.

    Args:
        lengths: tokens of each document, at most `capacity`.
        capacity: tokens of a sample.

    Returns:
        The documents of each sample, rising.
    """
    samples: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # samples with exactly this room; the first one is taken
    rooms = 0  # bit r is set where a sample has room r
    for document in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        size = int(lengths[document])
        enough = rooms >> size
        if enough:
            # the lowest bit from `size` on: the fullest sample that has room
            room = size + (enough & -enough).bit_length() - 1
            sample = heappop(by_room[room])
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, sample = capacity, len(samples)
            samples.append([])
        samples[sample].append(document)
        heappush(by_room.setdefault(room - size, []), sample)
        rooms |= 1 << (room - size)
    return [sorted(sample) for sample in samples]
