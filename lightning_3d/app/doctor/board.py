"""The board on which ranks post what they measured: a store at MASTER_ADDR and MASTER_PORT. A rank
that hangs posts nothing, and the others notice, which a collective could not do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from lightning_3d.app.doctor.time_limit import TimeLimit, within
from lightning_3d.errors import Lightning3DError
from lightning_3d.ranks.boards import store_outlives_ranks
from lightning_3d.ranks.rendezvous import explained_errors

_POLL_SECONDS = 0.02
_ANSWER_SECONDS = 10.0
"""Longest time of one call of the store."""


class Unreachable(Lightning3DError):
    """The board, or rank 0, which serves it and leads the checks, does not answer."""

    exit_code = 1


class DoctorBoard:
    """Values that all ranks can post and read.

    No call waits inside the store, whose connection serves one call at a time: waiting means asking
    again.

    Args:
        rank: this rank.
        seconds: time for the board to appear.
        serve: whether this process serves the store. None: rank 0 does, unless torchrun's agent
            serves one.

    Raises:
        Unreachable: no connection in time.
        ConfigError: MASTER_ADDR or MASTER_PORT cannot be right.
    """

    def __init__(self, rank: int, seconds: float, *, serve: bool | None = None) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self._address, self._port = (
            os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ.get("MASTER_PORT", "29500")),
        )
        serves = rank == 0 and not store_outlives_ranks() if serve is None else serve
        limit = timedelta(seconds=seconds)

        def connect() -> Any:
            with explained_errors(rank):
                # Without waiting for the other ranks, so that those that never appear can be named.
                return TCPStore(
                    self._address, self._port, None, serves, limit, wait_for_workers=False
                )

        try:
            self._server = within(seconds + _ANSWER_SECONDS, connect)
        except (TimeLimit, RuntimeError) as error:
            why = f": {error}" if str(error) else ""
            raise Unreachable(
                f"Rank {rank} on {os.uname().nodename} cannot reach the store at"
                f" {self._address}:{self._port} (MASTER_ADDR and MASTER_PORT) within {seconds:g}"
                f" s{why}. Check that rank 0 runs, and that no firewall closes the port."
            ) from None
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = PrefixStore(f"lightning_3d doctor {restarts}", self._server)

    def second_connection(self, rank: int, seconds: float) -> Any:
        """Connect once more, and return a store for a process group, whose calls may hang."""
        from torch.distributed import PrefixStore

        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return PrefixStore(f"groups {restarts}", DoctorBoard(rank, seconds, serve=False)._server)

    def post(self, key: str, value: Any) -> None:
        """Post a value of JSON."""
        self._call(lambda: self._store.set(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """Return a posted value; None if there is none yet."""
        return self._call(
            lambda: json.loads(self._store.get(key)) if self._store.check([key]) else None
        )

    def wait(self, key: str, seconds: float) -> Any:
        """Return a value as soon as it is posted.

        Raises:
            TimeLimit: nobody posted it in time.
        """
        values = self.wait_for_all([key], seconds)
        if key not in values:
            raise TimeLimit
        return values[key]

    def wait_for_all(self, keys: Iterable[str], seconds: float) -> dict[str, Any]:
        """Return the values of those keys that are posted in time."""
        missing, found = list(keys), {}
        deadline = time.monotonic() + seconds
        while True:
            for key in list(missing):
                value = self.read(key)
                if value is not None:
                    found[key] = value
                    missing.remove(key)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_SECONDS)

    def _call(self, action: Any) -> Any:
        try:
            return within(_ANSWER_SECONDS, action)
        except (TimeLimit, RuntimeError):
            raise Unreachable(
                f"The store at {self._address}:{self._port} does not answer: rank 0, or torchrun on"
                " its host, hangs or has ended."
            ) from None
