"""Boards on which ranks post their failures: a folder on one machine, or a store that all ranks
reach. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from lightning_3d.ranks.failure import Failure
from lightning_3d.ranks.meeting_store import JOIN_SECONDS, connect_store, store_outlives_ranks

FOLDER_VARIABLE = "LIGHTNING_3D_FAILURES"
"""Environment variable with the folder that serves as board. The supervisor sets it for its
ranks."""

_KEY = "lightning_3d/failure"
_SEEN = "lightning_3d/failure_seen"
_FORGOTTEN = "lightning_3d/failure_forgotten"


class Board(Protocol):
    """A place where ranks post failures. The methods may be called from any thread."""

    def post(self, failure: Failure) -> bool:
        """Post a failure. Returns True if this rank is the one that prints it."""

    def first(self) -> Failure | None:
        """Return the failure that is the cause; None as long as there is none."""

    def forget(self, rank: int) -> None:
        """Clear the board, because `rank` and all other ranks caught the posted failure and train
        again."""

    def share(self, topic: str, rank: int, text: str) -> None:
        """Let all ranks read a text of this rank. A later one takes the place of an earlier one; an
        empty one takes it away."""

    def shared(self, topic: str) -> dict[int, str]:
        """Return the texts of a topic by rank."""


class LocalBoard:
    """Board of a single process, which prints its own failure."""

    def post(self, failure: Failure) -> bool:
        return True

    def first(self) -> Failure | None:
        return None

    def forget(self, rank: int) -> None:
        pass

    def share(self, topic: str, rank: int, text: str) -> None:
        pass

    def shared(self, topic: str) -> dict[int, str]:
        return {}


_ROOM = 2**14
"""Bytes for the failure of a rank; longer ones need new room."""


class FolderBoard:
    """Board with one file for each failed rank in a folder of this machine. The supervisor prints
    the cause, so no rank does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reserve(self, ranks: int) -> None:
        """Keep room on the disk for the failures of all ranks: it may be full when they fail, and
        perhaps for that reason."""
        for rank in range(ranks):
            # a file system that compresses would find room for zeros
            self._draft(rank).write_bytes(os.urandom(_ROOM))

    def _draft(self, rank: int) -> Path:
        return self.folder / f"draft_{rank}.json"

    def post(self, failure: Failure) -> bool:
        path, draft = self.folder / f"failure_{failure.rank}.json", self._draft(failure.rank)
        try:
            with draft.open("r+" if draft.exists() else "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(failure)))
                file.truncate()
        except OSError:  # there is no room after all: the rank prints its failure itself
            return True
        with contextlib.suppress(FileExistsError):  # the first failure of a rank counts
            os.link(draft, path)
        # writing it again would change the post, which is the same file (a hard link)
        draft.unlink()
        return False

    def all(self) -> list[Failure]:
        """Return the failures of all ranks, earliest first."""
        posts = [
            Failure(**json.loads(path.read_text("utf-8")))
            for path in self.folder.glob("failure_*.json")
        ]
        return sorted(posts, key=lambda failure: failure.time)

    def first(self) -> Failure | None:
        return next(iter(sorted(self.all(), key=lambda failure: failure.lost_peer)), None)

    def forget(self, rank: int) -> None:
        (self.folder / f"failure_{rank}.json").unlink(missing_ok=True)

    def share(self, topic: str, rank: int, text: str) -> None:
        path = self.folder / f"{topic}_{rank}.shared"
        if not text:
            path.unlink(missing_ok=True)
            return
        draft = path.with_suffix(".draft")
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)

    def shared(self, topic: str) -> dict[int, str]:
        found: dict[int, str] = {}
        for path in self.folder.glob(f"{topic}_*.shared"):
            with contextlib.suppress(FileNotFoundError):  # taken away meanwhile
                found[int(path.stem.rpartition("_")[2])] = path.read_text("utf-8")
        return found


class StoreBoard:
    """Board in a key of a store that all ranks reach, set by the first rank that fails.

    A rank that only lost its connection to another rank waits a moment for that rank's own failure
    before it posts.

    Args:
        store: a `torch.distributed.Store`.
        world_size: number of ranks of the run.
        serves: whether this process runs the store's server, and so must wait until the others have
            read.
        patience: seconds to wait for the cause, and for readers.
        lasting: a store that outlives this attempt, if torchrun may restart the ranks.
    """

    def __init__(
        self,
        store: Any,
        world_size: int,
        *,
        serves: bool = False,
        patience: float = 3.0,
        lasting: Any = None,
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
            # The store is gone with rank 0, which served it. Rank 1 prints for all that are left.
            return failure.rank == 1

    def first(self) -> Failure | None:
        text = self._posted()
        return Failure(**json.loads(text)) if text != self._past else None

    def forget(self, rank: int) -> None:
        """Clear the board. Collective: no rank continues, so that none can fail again, before all
        ranks have cleared it."""
        self._past = self._posted()
        rounds = -(-self._store.add(_FORGOTTEN, 1) // self._world_size)
        _poll(lambda: self._store.add(_FORGOTTEN, 0) >= rounds * self._world_size or None, 60.0)

    def broadcast(self, key: str, value: str, rank: int) -> str:
        """Broadcast a value of rank 0 under a key. Collective over the world; rank 0 returns when
        all have read it."""
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

    def earlier_broadcast(self, key: str) -> str | None:
        """Return the last value that rank 0 broadcast under a key in an earlier attempt; None where
        there is none."""
        key = f"lightning_3d/{key}"
        return (
            self._lasting.get(key).decode()
            if self._lasting is not None and self._lasting.check([key])
            else None
        )

    def share(self, topic: str, rank: int, text: str) -> None:
        self._store.set(f"lightning_3d/{topic}/{rank}", text)
        self._store.set(f"lightning_3d/{topic}", "1")

    def shared(self, topic: str) -> dict[int, str]:
        if not self._store.check([f"lightning_3d/{topic}"]):
            return {}
        keys = {rank: f"lightning_3d/{topic}/{rank}" for rank in range(self._world_size)}
        texts = {
            rank: self._store.get(key).decode()
            for rank, key in keys.items()
            if self._store.check([key])
        }
        return {rank: text for rank, text in texts.items() if text}

    def _posted(self) -> str:
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""


def _poll(look: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def connect_board(rank: int, world_size: int, seconds: float = JOIN_SECONDS) -> Board:
    """Connect to the board of this run: the supervisor's folder, else the store at MASTER_ADDR and
    MASTER_PORT.

    The store has its own connection, which the ranks reach whether or not the process group is up.

    Args:
        seconds: see `connect_store`.

    Raises:
        ConfigError, RendezvousError: see `connect_store`.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        return FolderBoard(Path(folder))
    if world_size == 1 or "MASTER_ADDR" not in os.environ:
        return LocalBoard()
    store, lasting = connect_store(rank, world_size, seconds)
    return StoreBoard(
        store, world_size, serves=rank == 0 and not store_outlives_ranks(), lasting=lasting
    )
