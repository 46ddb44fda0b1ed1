"""The keyed bijection that orders samples: a permutation for every size, the same on every
platform, and without visible structure."""

from __future__ import annotations

from collections import Counter
from hashlib import blake2b
from itertools import permutations

import numpy as np
import pytest

from lightning_3d.app.training.data.permutation import Permutation


def reference(size: int, *key: int) -> list[int]:
    """The network as its definition says, on Python's integers."""
    digest = blake2b(":".join(str(part) for part in key).encode(), digest_size=64).digest()
    base = 2
    while base * base < size:
        base *= 2

    def encrypt(value: int) -> int:
        left, right = divmod(value, base)
        for start in range(0, 64, 8):
            word = right ^ int.from_bytes(digest[start : start + 8], "little")
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                word = (word ^ word >> shift) * factor % 2**64
            left, right = right, left ^ (word ^ word >> 31) % base
        return left * base + right

    order = []
    for value in range(size):
        value = encrypt(value)
        while value >= size:
            value = encrypt(value)
        order.append(value)
    return order


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000])
def test_an_array_a_single_place_and_the_definition_agree(size: int) -> None:
    for key in ((0, 0), (7, 3)):
        order = Permutation(size, *key)
        expected = reference(size, *key)
        assert order.at(np.arange(size)).tolist() == expected
        assert [order[place] for place in range(size)] == expected
        assert list(order.follow(range(0, size, 3))) == expected[::3]


def test_the_order_never_changes() -> None:
    """Runs resume on other machines and with later versions."""
    assert [Permutation(10, 1, 0)[place] for place in range(10)] == [1, 2, 5, 6, 0, 9, 4, 8, 7, 3]
    assert Permutation(5 * 10**9, 1, 2).at(np.arange(10**9, 10**9 + 4)).tolist() == [
        719795163,
        950752465,
        7514107,
        4605547230,
    ]


def test_each_element_once_for_any_size() -> None:
    """Some of the larger ones here; all of them, with more keys, in the next test."""
    for size in (*range(1, 301), *range(301, 2001, 17)):
        assert np.array_equal(
            np.sort(Permutation(size, size, 0).at(np.arange(size))), np.arange(size)
        ), size


@pytest.mark.parametrize("size", [4**8, 4**8 + 1, 10**6 + 3])
def test_each_element_once_for_a_large_size(size: int) -> None:
    assert (
        np.bincount(Permutation(size, 5, 2).at(np.arange(size)), minlength=size).tolist()
        == [1] * size
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", range(8))
def test_each_element_once_for_every_size(seed: int) -> None:
    for size in range(1, 2001):
        assert np.array_equal(
            np.sort(Permutation(size, seed, 1).at(np.arange(size))), np.arange(size)
        ), size


def test_a_small_set_has_all_its_orders_equally_often() -> None:
    for size in (3, 4):
        orders = (Permutation(size, seed, 0) for seed in range(1500))
        found = Counter(tuple(order[place] for place in range(size)) for order in orders)
        assert_even([found[order] for order in permutations(range(size))])


@pytest.mark.parametrize("size", [50_000, 10**6 + 7, 10**12])
def test_places_and_differences_of_neighbors_are_evenly_spread(size: int) -> None:
    for seed in range(3):
        values = Permutation(size, seed, 1).at(np.arange(min(size // 10, 100_000)))
        following = np.diff(values) % size
        assert_even(np.histogram(values, bins=100, range=(0, size))[0])
        assert_even(np.histogram(following, bins=100, range=(0, size))[0])
        assert_even(
            np.histogram2d(values[:-1], values[1:], bins=10, range=((0, size), (0, size)))[
                0
            ].ravel()
        )
        assert_even(np.bincount(values % 32, minlength=32))


def test_epochs_and_seeds_have_unrelated_orders() -> None:
    places = np.arange(100_000)
    first = Permutation(len(places), 0, 0).at(places)
    for key in ((0, 1), (1, 0), (1, 1), (10, 0)):
        other = Permutation(len(places), *key).at(places)
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.015 and (first == other).sum() < 12


def test_a_place_outside_is_an_error() -> None:
    for place in (-1, 3):
        with pytest.raises(IndexError):
            Permutation(3, 0)[place]


def assert_even(counts: np.ndarray | list[int]) -> None:
    """Chi-square: within five standard deviations of what random numbers have. Fewer elements than
    a set is left have less."""
    counts = np.asarray(counts, float)
    freedom = len(counts) - 1
    chi_square = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert 0.4 * freedom < chi_square < freedom + 5 * (2 * freedom) ** 0.5
