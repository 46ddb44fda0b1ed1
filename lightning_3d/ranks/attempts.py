"""A store for the ranks of one attempt, where the server outlives attempts: torchrun keeps it when it starts ranks again.

What an earlier attempt left there must not be taken for this one's. torchrun's TORCHELASTIC_RESTART_COUNT does not tell attempts
apart: a node that starts its ranks again because another node did, not because its own failed, does not count (torch 2.13).
"""

from __future__ import annotations

import time
import uuid
from typing import Any

_HELLO, _WELCOME, _JOINED = "lightning_3d/hello", "lightning_3d/welcome", "lightning_3d/joined"
_POLL_SECONDS = 0.05


def name_attempt(store: Any, rank: int, world_size: int, seconds: float = 1800.0) -> str:
    """A word that the ranks of this attempt share and no other attempt has. Collective.

    Every rank says hello with a word that only it can have made up, and takes the answer to that word. Rank 0 answers words, old ones
    too, until all ranks have thanked it.

    Args:
        store: a `torch.distributed.Store`.
        seconds: until rank 0 gives up.

    Raises:
        TimeoutError: on rank 0, names ranks that never came.
    """
    mine = uuid.uuid4().hex
    if rank > 0:
        store.set(f"{_HELLO}/{rank}", mine)
        attempt = store.get(f"{_WELCOME}/{mine}").decode()
        store.add(f"{_JOINED}/{attempt}", 1)
        return attempt
    answered: set[bytes] = set()
    deadline = time.monotonic() + seconds
    keys = [f"{_HELLO}/{other}" for other in range(1, world_size)]
    while store.add(f"{_JOINED}/{mine}", 0) < world_size - 1:
        there = [key for key in keys if store.check([key])] if len(answered) < len(keys) else keys
        for word in (store.get(key) for key in there):
            if word not in answered:
                store.set(f"{_WELCOME}/{word.decode()}", mine)
                answered.add(word)
        if time.monotonic() > deadline:
            absent = [key.rpartition("/")[2] for key in keys if not store.check([key])]
            raise TimeoutError(f"Ranks {', '.join(absent) or '(some)'} of {world_size} did not join within {seconds:.0f} seconds.")
        time.sleep(_POLL_SECONDS)
    return mine
