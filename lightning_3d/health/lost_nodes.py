"""Notices within half a minute that a node has lost its power or its network. Imports no torch.

The connections of such a node just stay silent: ranks that wait for it would wait until the watch for hangs finds them. So the lowest rank
of each node keeps a connection to rank 0, over which nothing is sent but TCP's own keep-alive probes. The kernel answers them, so
a process that is stopped, or busy for minutes, does not count as lost. A connection that closes without a good-bye belongs to a process
that was killed: if the run makes no progress after that, it ends, because ranks on GPUs may wait for the dead one forever.

The other ranks of a node hear from its lowest one, or from the board of rank 0, which only its own node may still reach. Linux only.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_3d.errors import plural, spans
from lightning_3d.health.node_links import CONNECT_SECONDS, Doorkeeper, Route, connect, listen_for, route_to_rank_0
from lightning_3d.health.processes import machine_name
from lightning_3d.ranks.reporter import FailureReporter

PROBES = 3
"""A node is lost if it has answered none of this many probes after a silence as long as one probe."""

GONE_SECONDS = 12.0
"""Time without progress after which the run ends when a rank on another node has ended without a good-bye. Others may report it first."""

_GONE_LOOKS = 3  # after as many times with progress, the connection was lost, but not the rank
_HELLO, _GOODBYE = b"+", b"."
_LOOK_SECONDS = 1.0
_LISTENER, _LEADER = -1, -2  # connections that lead to no other node

_RESUME = (
    "To resume the last checkpoint, start the run again with trainer.auto_resume=true, or your script with"
    ' ckpt_path="last".'
)

AllGather = Callable[[Any], list[Any]]


class LostNodes:
    """Watches the other nodes from rank 0, and rank 0's node from the lowest rank of every other node.

    Args:
        reporter: ends all ranks.
        rank: this rank.
        nodes: name of each rank's node, by rank.
        leaders: lowest rank on each rank's node, by rank. Containers on different nodes may have the same name.
        seconds, beats: see `watch`.
    """

    def __init__(
        self,
        reporter: FailureReporter,
        rank: int,
        nodes: Sequence[str],
        leaders: Sequence[int],
        seconds: float,
        beats: Callable[[], int],
    ) -> None:
        self._reporter, self._rank, self._nodes, self._leaders = reporter, rank, nodes, leaders
        self._probe_seconds = max(1, round(seconds / (1 + PROBES)))
        self._beats = beats
        self._gone: dict[int, tuple[float, int, int]] = {}  # until when, beats at the last look, looks that are left
        self._met: set[int] = set()
        self._closed = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._doorkeeper: Doorkeeper | None = None
        self._siblings: list[socket.socket] = []
        self._thread: threading.Thread | None = None

    @classmethod
    def watch(
        cls, reporter: FailureReporter, rank: int, all_gather: AllGather, seconds: float, beats: Callable[[], int]
    ) -> LostNodes:
        """Connect the nodes and watch them in a thread. Collective over the world.

        Args:
            all_gather: returns the objects of all ranks, by rank.
            seconds: time without an answer after which a node counts as lost, in whole seconds for each probe.
            beats: function that returns a number which rises with the progress of this rank.
        """
        machines = all_gather((machine_name(), socket.gethostname()))
        names = [machine for machine, _ in machines]
        leaders = [names.index(machine) for machine in names]
        watch = cls(reporter, rank, [host for _, host in machines], leaders, seconds, beats)
        if len(set(leaders)) == 1 or sys.platform != "linux":
            return watch
        others = sorted(set(leaders) - {0})
        route = route_to_rank_0() if rank in others else None
        routes = all_gather(route)
        listeners, places = listen_for([routes[leader] for leader in others]) if rank == 0 else ([], [])
        places, token = all_gather((places, secrets.token_bytes(16)) if rank == 0 else None)[0]
        # The name is visible to all users of a machine, unlike the token.
        siblings = f"\0lightning_3d-{hashlib.sha256(token).hexdigest()}-{leaders[rank]}"
        if rank == 0:
            watch._doorkeeper = Doorkeeper(watch._selector, listeners, token, others, watch._keep)
            watch._run(lambda: None)
        elif rank in others:
            watch._run(lambda: watch._connect(route, places[others.index(rank)], token, _listen_to_siblings(siblings)))
        elif leaders[rank] > 0:
            watch._run(lambda: watch._follow(siblings))
        return watch

    @property
    def _seconds(self) -> int:
        return self._probe_seconds * (1 + PROBES)

    def close(self) -> None:
        """Stop watching, before this rank ends in order."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * _LOOK_SECONDS)
        for key in list(self._selector.get_map().values()):
            one: Any = key.fileobj
            if isinstance(key.data, int) and key.data >= 0:
                with contextlib.suppress(OSError):
                    one.send(_GOODBYE)
            one.close()
        for sibling in self._siblings:
            sibling.close()
        self._selector.close()

    def _run(self, connect: Callable[[], None]) -> None:
        def run() -> None:
            connect()
            while not self._closed.is_set():
                self._look()

        self._thread = threading.Thread(target=run, name="lightning_3d-nodes", daemon=True)
        self._thread.start()

    def _connect(self, route: Route | None, place: tuple[str, int] | None, token: bytes, siblings: socket.socket) -> None:
        """Connect to rank 0, and listen for the other ranks of this node."""
        self._selector.register(siblings, selectors.EVENT_READ, _LISTENER)
        try:
            if route is None or place is None:
                raise OSError("the address of this node or of rank 0's node is unknown")
            connection = connect(route, place, token, self._rank)
        except OSError as error:
            print(
                f"lightning_3d: rank {self._rank} cannot connect to {f'port {place[1]} of ' if place else ''}rank 0's node ({error}), so"
                " only the watch for hangs (hang_timeout) notices when a node is lost. To turn this watch off, set lost_node_timeout=null.",
                file=sys.stderr,
                flush=True,
            )
            return
        self._keep(connection, 0)

    def _follow(self, place: str) -> None:
        """Connect to the lowest rank of this node, as soon as it listens."""
        deadline = time.monotonic() + CONNECT_SECONDS
        leader = socket.socket(socket.AF_UNIX)
        while not self._closed.is_set() and time.monotonic() < deadline:
            try:
                leader.connect(place)
            except OSError:
                self._closed.wait(_LOOK_SECONDS)
                continue
            leader.setblocking(False)
            self._selector.register(leader, selectors.EVENT_READ, _LEADER)
            return
        leader.close()

    def _keep(self, connection: socket.socket, rank: int) -> None:
        if self._closed.is_set():  # a fit that was over before the connection was there
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._probe_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._probe_seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        # The kernel sends no probes while the token is on its way.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * self._seconds)
        if self._rank == 0:  # the other side cannot know otherwise that the connection was accepted
            with contextlib.suppress(OSError):
                connection.send(_HELLO)
            self._met.add(rank)
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _look(self) -> None:
        """Wait a moment for news of a connection."""
        for rank in list(self._gone):
            self._look_at_progress(rank)
        if not self._selector.get_map():
            self._closed.wait(_LOOK_SECONDS)
            return
        if self._doorkeeper is not None:
            self._doorkeeper.close_if_late()
        for key, _ in self._selector.select(_LOOK_SECONDS):
            connection: Any = key.fileobj
            if key.data is self._doorkeeper:
                self._doorkeeper.answer(connection)
            elif key.data == _LISTENER:
                self._siblings.append(connection.accept()[0])
            elif key.data == _LEADER:
                self._hear(connection)
            else:
                self._notice(connection, key.data)

    def _notice(self, connection: socket.socket, rank: int) -> None:
        """See how a connection to another node ended."""
        lost, said = None, b""
        try:
            said = connection.recv(1)
        except BlockingIOError:
            return
        except OSError as error:
            lost = None if error.errno == errno.ECONNRESET else error
        if said == _HELLO:
            self._met.add(rank)
            return
        self._selector.unregister(connection)
        connection.close()
        if self._closed.is_set() or said == _GOODBYE:
            return
        if lost is not None:
            self._end(self._message(rank, lost))
        if rank in self._met:
            self._gone[rank] = time.monotonic() + GONE_SECONDS, self._beats(), _GONE_LOOKS

    def _look_at_progress(self, rank: int) -> None:
        """End if a rank on another node has ended without a good-bye, and this one makes no progress without it."""
        until, before, left = self._gone[rank]
        if time.monotonic() < until:
            return
        beats = self._beats()
        if beats == before and not self._closed.is_set() and not self._reporter.reason:
            self._end(
                f"Rank {rank} on the node {self._nodes[rank]} has ended and reported no error (killed, or out of memory?)."
                f" Rank {self._rank} has made no progress for {GONE_SECONDS:.0f} s since then. {_RESUME}"
            )
        if left > 1 and beats != before:
            self._gone[rank] = time.monotonic() + GONE_SECONDS, beats, left - 1
        else:
            del self._gone[rank]

    def _hear(self, leader: socket.socket) -> None:
        """End with the lowest rank of this node, if it says so; it has printed why."""
        with contextlib.suppress(OSError):
            if leader.recv(1):
                os._exit(1)
        self._selector.unregister(leader)
        leader.close()

    def _end(self, message: str) -> None:
        """End all ranks; without rank 0's node, on which the board is, only those of this node."""
        if self._rank == 0:
            self._reporter.end_all(message)
        print(f"lightning_3d: {message}", file=sys.stderr, flush=True)
        for sibling in self._siblings:
            with contextlib.suppress(OSError):
                sibling.send(b"!")
        os._exit(1)

    def _message(self, rank: int, error: OSError) -> str:
        node, mine = self._nodes[rank], self._nodes[self._rank]
        ranks = [other for other, leader in enumerate(self._leaders) if leader == self._leaders[rank]]
        return (
            f"The node {node} with {plural(len(ranks), 'rank')} ({spans(ranks)}) is lost: it has not answered the node {mine} for"
            f" {self._seconds} s ({error.strerror}; lost_node_timeout). One of the two has crashed or has no network. {_RESUME}"
        )


def _listen_to_siblings(place: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    return listener
