"""Names for the attempts of a run in a store that outlives them: torchrun keeps its store when it
restarts the ranks.

Entries of an earlier attempt must not be mistaken for those of this one. torchrun's
TORCHELASTIC_RESTART_COUNT does not distinguish attempts: a node does not increase it when it
restarts its ranks only because a rank of another node failed (torch 2.13).
"""

from __future__ import annotations

import time
import uuid
from typing import Any

_HELLO, _WELCOME, _JOINED = "lightning_3d/hello", "lightning_3d/welcome", "lightning_3d/joined"
_POLL_SECONDS = 0.05


def name_attempt(store: Any, rank: int, world_size: int, seconds: float = 1800.0) -> str:
    """Agree on a name that all ranks of this attempt share and no other attempt has. Collective
    over the world.

    Every rank posts a random word and waits for the answer to that word. Rank 0 answers all words,
    old ones too, until all ranks have confirmed.

    Args:
        store: a `torch.distributed.Store`.
        rank: rank of this process.
        world_size: number of ranks.
        seconds: time after which rank 0 gives up.

    Raises:
        TimeoutError: on rank 0; names the ranks that did not join.
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
            raise TimeoutError(
                f"Ranks {', '.join(absent) or '(some)'} of {world_size} have not joined the run"
                f" within {seconds:g} s."
            )
        time.sleep(_POLL_SECONDS)
    return mine
