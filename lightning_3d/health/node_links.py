"""Connections between rank 0 and the other nodes, over the network by which they reach the store of the run. Imports no torch.

Rank 0 listens at no other address than those at which the other nodes reach it. Its host name is no help: on Debian it leads to 127.0.1.1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CONNECT_SECONDS = 30.0
"""Time for all nodes to connect."""

_TRY_SECONDS = 10.0
_MOST_STRANGERS, _BACKLOG = 128, 1024
_RANK_BYTES = 4


@dataclass(frozen=True)
class Route:
    """How a node reaches rank 0.

    Attributes:
        to: address of rank 0, as this node sees it.
        source: address of this node on the same network.
    """

    to: str
    source: str


def route_to_rank_0() -> Route | None:
    """Find how this node reaches rank 0. Sends nothing. None: no address of MASTER_ADDR has a route."""
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", "127.0.0.1"), 9, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # of UDP: only chooses the route
            return Route(str(place[0]), str(probe.getsockname()[0]))
    return None


def listen_for(routes: Sequence[Route | None]) -> tuple[list[socket.socket], list[tuple[str, int] | None]]:
    """Listen on rank 0, only at addresses that the other nodes use.

    Args:
        routes: of each of the other nodes.

    Returns:
        One socket for each address; and for each route the address and port that lead here, None where none does.
    """
    listeners: dict[str, socket.socket] = {}
    places: list[tuple[str, int] | None] = []
    for route in routes:
        known = _address_of(route, listeners) if route is not None else None
        places.append((known, listeners[known].getsockname()[1]) if known is not None else None)
    return list(listeners.values()), places


def _address_of(route: Route, listeners: dict[str, socket.socket]) -> str | None:
    """Return the address of this machine that a route leads to, with a listener. Routers may have translated the one that a node sees."""
    for address in (route.to, _address_towards(route.source)):
        if address is None:
            continue
        if address not in listeners:
            try:
                listeners[address] = socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)
            except OSError:  # not an address of this machine
                continue
        return address
    return None


def _address_towards(address: str) -> str | None:
    with contextlib.suppress(OSError), socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return None


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect(route: Route, place: tuple[str, int], token: bytes, rank: int) -> socket.socket:
    """Connect to rank 0, and show the token and who this is.

    Args:
        route: of this node.
        place: address and port at which rank 0 listens.

    Raises:
        OSError: no connection.
    """
    last = OSError("no address")
    for address in dict.fromkeys((place[0], route.to)):  # where the first one means another machine here, the other may lead there
        try:
            connection = socket.create_connection((address, place[1]), _TRY_SECONDS)
            connection.sendall(token + rank.to_bytes(_RANK_BYTES, "big"))
            return connection
        except OSError as error:
            last = error
    raise last


class Doorkeeper:
    """Accepts connections of the other nodes on rank 0, as part of a selector. Nobody waits for a connection that says nothing.

    Args:
        selector: waits for listeners and for connections that have not shown the token, with this object as data.
        token: what a connection must show first.
        ranks: those that are to come. Listening ends when all are there, or after `CONNECT_SECONDS`.
        keep: takes a connection that has shown the token, and the rank that made it.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listeners: Sequence[socket.socket],
        token: bytes,
        ranks: Sequence[int],
        keep: Callable[[socket.socket, int], None],
    ) -> None:
        self._selector, self._listeners, self._token, self._keep = selector, list(listeners), token, keep
        self._missing = set(ranks)
        self._strangers: dict[socket.socket, bytes] = {}
        self._until = time.monotonic() + CONNECT_SECONDS
        for listener in self._listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, self)

    def answer(self, one: Any) -> None:
        """Accept a connection, or read what one shows."""
        if one in self._listeners:
            with contextlib.suppress(OSError):
                connection, _ = one.accept()
                connection.setblocking(False)
                self._strangers[connection] = b""
                self._selector.register(connection, selectors.EVENT_READ, self)
            if len(self._strangers) > _MOST_STRANGERS:
                self._forget(next(iter(self._strangers)))
        elif one in self._strangers:
            self._read(one)
        if not self._missing:
            self.close()

    def close_if_late(self) -> None:
        """Stop listening when the time for all nodes to connect is over."""
        if self._listeners and time.monotonic() > self._until:
            self.close()

    def close(self) -> None:
        """Stop listening, and close all connections that have not shown the token."""
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []
        for stranger in list(self._strangers):
            self._forget(stranger)

    def _read(self, stranger: socket.socket) -> None:
        wanted = len(self._token) + _RANK_BYTES
        try:
            more = stranger.recv(wanted - len(self._strangers[stranger]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        shown = self._strangers[stranger] = self._strangers[stranger] + more
        if more and len(shown) < wanted:
            return
        rank = int.from_bytes(shown[len(self._token) :], "big")
        if not secrets.compare_digest(shown[: len(self._token)], self._token) or rank not in self._missing:
            self._forget(stranger)
            return
        self._missing.discard(rank)
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        self._keep(stranger, rank)

    def _forget(self, stranger: socket.socket) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()
