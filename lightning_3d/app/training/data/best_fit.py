"""Which whole documents share a sample. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

_OPEN = 64
"""Number of samples with room that `first_fit` considers."""


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


def first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each document into the first of the last few samples that has room, or into a new one; as
    `best_fit` otherwise."""
    samples: list[list[int]] = []
    room: list[int] = []
    for document, size in enumerate(lengths):
        place = next(
            (index for index in range(max(0, len(room) - _OPEN), len(room)) if room[index] >= size),
            None,
        )
        if place is None:
            place = len(samples)
            samples.append([])
            room.append(capacity)
        samples[place].append(document)
        room[place] -= size
    return samples


PACKINGS = {"best_fit": best_fit, "first_fit": first_fit}
