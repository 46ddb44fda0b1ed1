"""A shuffled order that takes no memory: a keyed bijection on 0, 1, ..., size - 1. NumPy only.

A Feistel network permutes 0, ..., 4**b - 1, the smallest such range that holds `size` numbers. A
result that is not less than `size` is permuted again until it is ("cycle walking"; Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). Fewer than four passes are needed on
average. All arithmetic is on 64-bit integers, so every platform has the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

import numpy as np

_ROUNDS = 8
_WORD = 2**64 - 1
_BLOCK = 1024


class Permutation:
    """A permutation of `range(size)` that depends on the size and the key only.

    Args:
        size: number of elements, at least 0 and at most 2**62.
        *key: what the order depends on, such as the seed and the epoch.
    """

    def __init__(self, size: int, *key: object) -> None:
        self._size = size
        self._bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = blake2b(":".join(map(str, key)).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [
            int.from_bytes(digest[start : start + 8], "little")
            for start in range(0, len(digest), 8)
        ]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        """Return the element at one place."""
        if not 0 <= index < self._size:
            raise IndexError(f"{index} is outside a permutation of {self._size}")
        value = self._pass(index)
        while value >= self._size:
            value = self._pass(value)
        return int(value)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the elements at several places, all at least 0 and less than the size.

        Returns:
            an array of int64 of the same shape.
        """
        values = self._pass(places.astype(np.uint64))
        while (outside := values >= self._size).any():
            values[outside] = self._pass(values[outside])
        return values.astype(np.int64)

    def follow(self, places: Iterable[int]) -> Iterator[int]:
        """Yield the elements at these places, one after the other."""
        places = iter(places)
        while block := list(islice(places, _BLOCK)):
            yield from self.at(np.array(block)).tolist()

    def _pass(self, value: Any) -> Any:
        """Run the Feistel network on an integer, or on an array of uint64."""
        half = (1 << self._bits) - 1
        left, right = value >> self._bits, value & half
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & half)
        return left << self._bits | right


def _mix(word: Any) -> Any:
    """Mix the bits of 64-bit words: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)
