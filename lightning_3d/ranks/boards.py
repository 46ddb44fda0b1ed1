"""Boards on which ranks post their failures: a folder of one machine, or a store that all ranks reach. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from lightning_3d.ranks.attempts import name_attempt
from lightning_3d.ranks.failure import Failure
from lightning_3d.ranks.rendezvous import explained_errors

FOLDER_VARIABLE = "LIGHTNING_3D_FAILURES"
"""Names the folder that serves as board. Set by the supervisor for its ranks."""

_KEY = "lightning_3d/failure"
_SEEN = "lightning_3d/failure_seen"
_FORGOTTEN = "lightning_3d/failure_forgotten"


class Board(Protocol):
    """Where failures are posted. The methods may be called from any thread."""

    def post(self, failure: Failure) -> bool:
        """Post a failure; True when this rank is the one that shows what failed."""

    def first(self) -> Failure | None:
        """The failure that is the cause, None as long as there is none."""

    def forget(self, rank: int) -> None:
        """Begin anew: `rank`, like all others, caught what was posted and trains again."""


class LocalBoard:
    """The board of a single process, which shows its own failure."""

    def post(self, failure: Failure) -> bool:
        return True

    def first(self) -> Failure | None:
        return None

    def forget(self, rank: int) -> None:
        pass


class FolderBoard:
    """One file per failed rank in a folder of this machine. The supervisor shows the cause, so no rank ever does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def post(self, failure: Failure) -> bool:
        path = self.folder / f"failure_{failure.rank}.json"
        draft = self.folder / f"draft_{failure.rank}.json"
        draft.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        with contextlib.suppress(FileExistsError):  # the first words of a rank count
            os.link(draft, path)
        draft.unlink()  # writing it again would change the post, which is the same file
        return False

    def all(self) -> list[Failure]:
        """Failures of all ranks, earliest first."""
        posts = [Failure(**json.loads(path.read_text("utf-8"))) for path in self.folder.glob("failure_*.json")]
        return sorted(posts, key=lambda failure: failure.time)

    def first(self) -> Failure | None:
        return next(iter(sorted(self.all(), key=lambda failure: failure.lost_peer)), None)

    def forget(self, rank: int) -> None:
        (self.folder / f"failure_{rank}.json").unlink(missing_ok=True)


class StoreBoard:
    """A key of a store that all ranks reach, set by the first rank that fails.

    A rank that only lost a peer waits a moment for the peer's own words before it posts.

    Args:
        store: a `torch.distributed.Store`.
        world_size: of the run.
        serves: this process holds the store's server, so that it must outlive the others' reading.
        patience: seconds to wait for the cause, and for readers.
        lasting: a store that outlives this attempt, where torchrun may start the ranks again.
    """

    def __init__(
        self, store: Any, world_size: int, *, serves: bool = False, patience: float = 3.0, lasting: Any = None
    ) -> None:
        self._store = store
        self._world_size = world_size
        self._serves = serves
        self._patience = patience
        self._lasting = lasting
        self._past = ""

    def post(self, failure: Failure) -> bool:
        try:
            cause = _poll(self.first, self._patience) if failure.lost_peer else self.first()
            if cause is None:
                text = json.dumps(asdict(failure))
                cause = Failure(**json.loads(self._store.compare_set(_KEY, self._past, text)))
            self._store.add(_SEEN, 1)
            if self._serves:
                _poll(lambda: self._store.add(_SEEN, 0) >= self._world_size or None, self._patience)
            return cause.rank == failure.rank
        except RuntimeError:
            # The store is gone with the process that served it, rank 0. Rank 1 speaks for all that are left.
            return failure.rank == 1

    def first(self) -> Failure | None:
        text = self._posted()
        return Failure(**json.loads(text)) if text != self._past else None

    def forget(self, rank: int) -> None:
        """Collective: no rank goes on, and can fail anew, before all have forgotten."""
        self._past = self._posted()
        rounds = -(-self._store.add(_FORGOTTEN, 1) // self._world_size)
        _poll(lambda: self._store.add(_FORGOTTEN, 0) >= rounds * self._world_size or None, 60.0)

    def tell_all(self, key: str, value: str, rank: int) -> str:
        """What rank 0 says under a key, in all ranks. Collective; rank 0 returns when all have read it."""
        key = f"lightning_3d/{key}"
        if rank == 0:
            self._store.set(key, value)
            if self._lasting is not None:
                self._lasting.set(key, value)
        value = self._store.get(key).decode()
        self._store.add(f"{key}/read", 1)
        if rank == 0:
            _poll(lambda: self._store.add(f"{key}/read", 0) >= self._world_size or None, 60.0)
        return value

    def told_before(self, key: str) -> str | None:
        """What rank 0 said last in an attempt before this one."""
        key = f"lightning_3d/{key}"
        return self._lasting.get(key).decode() if self._lasting is not None and self._lasting.check([key]) else None

    def _posted(self) -> str:
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""


def _poll(look: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def connect_board(rank: int, world_size: int) -> Board:
    """The board of this run: the supervisor's folder, else the store at MASTER_ADDR and MASTER_PORT.

    The store is a connection of its own, which the ranks of a world find whether or not the process group is up.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return FolderBoard(Path(folder))
    if world_size == 1 or "MASTER_ADDR" not in os.environ:
        return LocalBoard()
    store, lasting = connect_store(rank, world_size)
    return StoreBoard(store, world_size, serves=rank == 0 and not store_outlives_ranks(), lasting=lasting)


def store_outlives_ranks() -> bool:
    """Whether torchrun serves the store, and keeps it with all that is in it when it starts the ranks again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(rank: int, world_size: int) -> tuple[Any, Any]:
    """A `torch.distributed.Store` at MASTER_ADDR and MASTER_PORT, served by rank 0 or by torchrun: this attempt's part of it, and
    all of it where it outlives the attempt. Collective over the world.

    One connection serves all fits and evaluations of a process: if rank 0 let go of it in between, the others could reach a
    server that is just closing.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _store_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, world_size, restarts)


@lru_cache(maxsize=1)
def _store_at(address: str, port: str, rank: int, world_size: int, restarts: str) -> tuple[Any, Any]:
    from torch.distributed import PrefixStore, rendezvous

    with explained_errors(rank):
        store, _, _ = next(rendezvous("env://", rank, world_size))
    if not store_outlives_ranks():
        return PrefixStore("lightning_3d", store), None
    return PrefixStore(name_attempt(store, rank, world_size), store), store
