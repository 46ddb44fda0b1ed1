"""The store at MASTER_ADDR and MASTER_PORT, in which the ranks of a run meet. Imports torch only
when it connects.

The first ranks wait for the last, for a limited time. Then they name those that have not come.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from lightning_3d.errors import RendezvousError, listed
from lightning_3d.ranks.rendezvous import explained_errors

JOIN_SECONDS = 600.0
"""Time for all ranks to join, unless the caller sets another."""

_LOOPBACK = ("127.0.0.1", "localhost")

PORT_SECONDS = 10.0
"""Time for an earlier attempt to leave the port where rank 0 listens."""

_CALL_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_JOINED = "lightning_3d/joined"
_MOST_NAMED = 8

_connected: dict[tuple[str, ...], tuple[Any, Any]] = {}


def store_outlives_ranks() -> bool:
    """Check whether torchrun serves the store, and keeps its contents when it restarts the
    ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(rank: int, world_size: int, seconds: float = JOIN_SECONDS) -> tuple[Any, Any]:
    """Connect to the `torch.distributed.Store` at MASTER_ADDR and MASTER_PORT, served by rank 0 or
    torchrun. Collective over the world.

    One connection serves all fits and evaluations of a process: if rank 0 closed it in between, the
    others could reach a server that is just closing.

    Args:
        seconds: time for all ranks to join.

    Returns:
        This attempt's part of the store; and the whole store where it outlives the attempt, else
        None.

    Raises:
        ConfigError: see `explained_errors`. RendezvousError: ranks have not joined in time.
    """
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    key = (address, port, str(rank), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    # if it is, the world may be smaller now: an elastic run has left ranks out
    if key not in _connected:
        _connected.clear()
        _connected[key] = _connect(address, port, rank, world_size, seconds)
    return _connected[key]


def _connect(
    address: str, port: str, rank: int, world_size: int, seconds: float
) -> tuple[Any, Any]:
    from torch.distributed import DistError, PrefixStore, TCPStore

    lasts = store_outlives_ranks()
    serves = rank == 0 and not lasts

    def open_store() -> Any:
        options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": not lasts}
        if serves and address in _LOOPBACK:
            options["master_listen_fd"] = _listen_here(int(port)).detach()
        return TCPStore(
            address, int(port), world_size, serves, timedelta(seconds=seconds), **options
        )

    with explained_errors(rank):
        try:
            store = _when_port_is_free(open_store, f"{address}:{port}") if serves else open_store()
        except DistError as error:
            if "timed out" not in str(error):
                raise
            whose = "torchrun" if lasts else f"Rank 0 of {world_size}"
            raise _unreachable(
                f"{whose} could not be reached at {address}:{port} {_within(seconds)} {_ADVICE}",
                rank,
            ) from None
    try:
        if lasts:
            part = PrefixStore(name_attempt(store, rank, world_size, seconds), store)
        else:
            _join(store, rank, world_size, seconds)
            part = PrefixStore("lightning_3d", store)
    except TimeoutError as error:
        raise RendezvousError(f"{error} {_ADVICE}") from None
    except DistError:
        if not lasts:  # rank 0, which serves the store, has ended, and has said why
            raise RendezvousError(
                f"Rank 0 of {world_size} ended before all ranks had joined the run."
            ) from None
        raise _unreachable(
            f"{_absent([0], world_size)} {_within(seconds)} {_ADVICE}", rank
        ) from None
    store.set_timeout(timedelta(seconds=_CALL_SECONDS))
    return part, store if lasts else None


def _listen_here(port: int) -> socket.socket:
    """Listen for the ranks of this machine only, where torch would listen on all networks.

    Raises:
        RuntimeError: as torch's, if the port is taken.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise RuntimeError(f"{errno.errorcode.get(error.errno or 0, '')}: {error}") from error
    return listener


def _when_port_is_free(open_store: Callable[[], Any], place: str) -> Any:
    """Serve a store as soon as an earlier attempt of the run, which may still be ending, has left
    the port.

    Raises:
        RuntimeError: the port is still taken after `PORT_SECONDS`, or cannot be used.
    """
    deadline, announced = time.monotonic() + PORT_SECONDS, False
    while True:
        try:
            return open_store()
        except RuntimeError as error:
            if "EADDRINUSE" not in str(error) or time.monotonic() > deadline:
                raise
        if not announced:
            words = (
                f"lightning_3d: waiting up to {PORT_SECONDS:.0f} s for {place}, where another"
                " process listens"
            )
            print(words, file=sys.stderr, flush=True)
        announced = True
        time.sleep(_POLL_SECONDS)


_ADVICE = (
    "Look at the logs of the ranks that are missing: they may not have been started, may still"
    " import or read files, or cannot reach this address. To wait longer, set"
    " trainer.rendezvous_timeout."
)


def _join(store: Any, rank: int, world_size: int, seconds: float) -> None:
    """Tell that this rank is there, and wait for the others. Raises TimeoutError."""
    store.set(f"{_JOINED}/{rank}", socket.gethostname())
    keys = [f"{_JOINED}/{other}" for other in range(world_size)]
    deadline = time.monotonic() + seconds
    while not store.check(keys):  # `store.wait` would print warnings of torch's
        if time.monotonic() > deadline:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(f"{_absent(missing, world_size)} {_within(seconds)}")
        time.sleep(_POLL_SECONDS)


def _unreachable(text: str, rank: int) -> RendezvousError:
    """Make an error where rank 0 is missing, which alone prints the others. One rank of each
    machine prints this one."""
    if rank == 1 or os.environ.get("LOCAL_RANK") == "0":
        print(f"lightning_3d: {text}", file=sys.stderr, flush=True)
    return RendezvousError(text)


def _absent(ranks: Iterable[int], world_size: int) -> str:
    names = [str(rank) for rank in ranks]
    shown = [
        *names[:_MOST_NAMED],
        *([f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []),
    ]
    return (
        f"Rank{'s' * (len(names) > 1)} {listed(shown)} of {world_size}"
        f" {'has' if len(names) == 1 else 'have'} not joined the run"
    )


def _within(seconds: float) -> str:
    return f"within {seconds:g} s."


# Names for the attempts of a run in a store that outlives them: torchrun keeps its store when it
# restarts the ranks.
# Entries of an earlier attempt must not be mistaken for those of this one. torchrun's
# TORCHELASTIC_RESTART_COUNT does not distinguish attempts: a node does not increase it when it
# restarts its ranks only because a rank of another node failed (torch 2.13).

_HELLO, _WELCOME, _CONFIRMED = (
    "lightning_3d/hello",
    "lightning_3d/welcome",
    "lightning_3d/confirmed",
)
_WELCOME_POLL_SECONDS = 0.05


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
        store.add(f"{_CONFIRMED}/{attempt}", 1)
        return attempt
    answered: set[bytes] = set()
    deadline = time.monotonic() + seconds
    keys = [f"{_HELLO}/{other}" for other in range(1, world_size)]
    while store.add(f"{_CONFIRMED}/{mine}", 0) < world_size - 1:
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
        time.sleep(_WELCOME_POLL_SECONDS)
    return mine
