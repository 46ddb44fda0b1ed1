"""Token files read as one sequence, without opening more of them at a time than the system allows.
NumPy only."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lightning_3d.errors import DataError
from lightning_3d.storage.piece_cache import CachedFile, Piece, PieceCache
from lightning_3d.storage.remote_path import Place

_OPEN_FILES = 128
"""Files that a process keeps mapped: each takes a file descriptor, and a system may allow 1024."""


@dataclass(frozen=True)
class TokenPart:
    """A file of token ids in little-endian order.

    Attributes:
        path: the file; a URL only until it has a cache.
        dtype: name of NumPy's type of ids.
        tokens: number of ids.
        identity: hash that tells its contents from others: that of a manifest, and of a URL that of
            its version; None if not known.
        offset: bytes before the first id.
        ends: file with the end of each document, counted in ids, in ascending order; None if
            documents have no index.
    """

    path: Place | CachedFile
    dtype: str
    tokens: int
    identity: str | None = None
    offset: int = 0
    ends: TokenPart | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Read the ids [start, stop): a view of the mapped file, or a copy of what a cache has of a
        URL."""
        if not isinstance(self.path, CachedFile):
            return _map(self)[start:stop]
        return np.frombuffer(self.path.read(*self._span(start, stop)), self.numpy_dtype)

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Return the places of the ids in [start, stop) at which documents begin, in ascending
        order. Needs `ends`.

        Raises:
            DataError: the ends are not in ascending order.
        """
        assert self.ends is not None
        first, last = (
            bisect_left(range(self.ends.tokens), place, key=self.ends._id_at)
            for place in (start, stop)
        )
        places = self.ends.read(first, last).astype(np.int64)
        if places.size and (places[0] < start or places[-1] >= stop or (np.diff(places) < 0).any()):
            raise DataError(
                f"{self.ends.path} is damaged: the ends of its documents are not in ascending"
                " order. Copy it again."
            )
        return np.concatenate([np.zeros(int(start == 0), np.int64), places])

    def _id_at(self, place: int) -> int:
        return int(self.read(place, place + 1)[0])

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of the cache that the ids [start, stop) are in; none for a file on the
        disk."""
        if not isinstance(self.path, CachedFile):
            return []
        return [(self.path, number) for number in self.path.pieces(*self._span(start, stop))]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._span(0, self.tokens)[1]

    def _span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the bytes that the ids [start, stop) are in."""
        width = self.numpy_dtype.itemsize
        return self.offset + start * width, self.offset + stop * width

    @property
    def numpy_dtype(self) -> np.dtype:
        return np.dtype(self.dtype).newbyteorder("<")


class Concatenation:
    """The tokens of several files, one after the other; an array of one dimension whose slices are
    read on demand.

    `array[start:stop]` is another `Concatenation` and reads nothing. `numpy.asarray(array)` reads
    it: a view of the mapped file where all of it is in one file, else a copy.

    Attributes:
        dtype: type that holds the ids of all files.
    """

    def __init__(self, parts: Sequence[TokenPart]) -> None:
        self._parts = [part for part in parts if part.tokens]
        self._ends = np.cumsum([part.tokens for part in self._parts], dtype=np.int64)
        self._start, self._stop = 0, int(self._ends[-1]) if self._parts else 0
        self.dtype = (
            np.result_type(*{np.dtype(part.dtype) for part in parts})
            if parts
            else np.dtype(np.uint16)
        )

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def nbytes(self) -> int:
        return len(self) * self.dtype.itemsize

    def __getitem__(self, place: slice) -> Concatenation:
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError("a Concatenation has slices of step 1 only")
        part = object.__new__(Concatenation)
        part.__dict__ |= self.__dict__
        part._start, part._stop = self._start + start, self._start + max(start, stop)
        return part

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        pieces = [part.read(start, stop) for part, start, stop in self._ranges()]
        whole = (
            pieces[0]
            if len(pieces) == 1
            else np.concatenate(pieces or [np.empty(0, self.dtype)], dtype=self.dtype)
        )
        return whole.astype(self.dtype if dtype is None else dtype, copy=bool(copy))

    @property
    def has_ends(self) -> bool:
        """Whether all files have an index of their documents."""
        return all(part.ends is not None for part in self._parts)

    def begins(self) -> np.ndarray:
        """Mark the first id of each document by the indices of the files, (ids,) of bool. A file
        begins with a document."""
        marks, place = np.zeros(len(self), dtype=bool), 0
        for part, start, stop in self._ranges():
            marks[place + part.begins(start, stop) - start] = True
            place += stop - start
        return marks

    @property
    def cache(self) -> PieceCache | None:
        """The cache of remote data through which it is read; None if all files are on the disk."""
        return next(
            (part.path.cache for part in self._parts if isinstance(part.path, CachedFile)), None
        )

    def pieces(self) -> list[Piece]:
        """Return the pieces of the cache of remote data that all of it is in; none for files on the
        disk."""
        return [piece for part, start, stop in self._ranges() for piece in part.pieces(start, stop)]

    def _ranges(self) -> Iterator[tuple[TokenPart, int, int]]:
        """Yield (file, first id, id after the last one) for each file that has a part of it."""
        place = self._start
        number = int(np.searchsorted(self._ends, place, side="right"))
        while place < self._stop:
            part, end = self._parts[number], int(self._ends[number])
            first = end - part.tokens
            yield part, place - first, min(self._stop, end) - first
            place, number = end, number + 1


def first_held_out(samples: int, fraction: float) -> int:
    """Return the index of the first sample that is held out of a source: its last samples are, at
    least one; none if `fraction` is 0."""
    return samples if fraction == 0 else max(0, samples - max(1, round(samples * fraction)))


@lru_cache(maxsize=_OPEN_FILES)
def _map(part: TokenPart) -> np.ndarray:
    assert isinstance(part.path, Path), "a URL needs a cache"
    return np.memmap(
        part.path, dtype=part.numpy_dtype, mode="r", offset=part.offset, shape=(part.tokens,)
    )
