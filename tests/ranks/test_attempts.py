"""Ranks that torchrun starts again find each other, not what the ranks before them left in its
store."""

import threading

import pytest
from torch.distributed import HashStore

from lightning_3d.ranks.meeting_store import name_attempt


def names(
    store: HashStore, ranks: list[int], world_size: int, seconds: float = 60
) -> dict[int, str]:
    found: dict[int, str] = {}

    def join(rank: int) -> None:
        found[rank] = name_attempt(store, rank, world_size, seconds)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    return found


def test_attempts_have_names_of_their_own() -> None:
    store = HashStore()
    attempts = [names(store, [3, 1, 0, 2], 4) for _ in range(5)]
    assert all(
        sorted(found) == [0, 1, 2, 3] and len(set(found.values())) == 1 for found in attempts
    )
    assert len({found[0] for found in attempts}) == 5


def test_words_of_ranks_that_are_gone_do_not_count() -> None:
    store = HashStore()
    for rank in (1, 2):  # an attempt in which neither rank 0 nor rank 3 came so far
        store.set(f"lightning_3d/hello/{rank}", "of the first attempt")
    assert len(set(names(store, [0, 1, 2, 3], 4).values())) == 1


def test_rank_that_never_joins_is_named() -> None:
    store = HashStore()
    store.set("lightning_3d/hello/1", "here")
    with pytest.raises(TimeoutError, match="Ranks 2, 3 of 4 have not joined"):
        name_attempt(store, 0, 4, seconds=0.2)
