"""Messages between ranks of one host through shared memory.

gloo sends a message between two processes of a host through the network stack: it is copied four
times, and threads of both sides are woken for every part. Here the sender writes it once, into
memory that both processes map, and every receiver reads it there. A token on a Unix socket says
where it is. The socket also carries the descriptor of the memory (`memfd_create`, `SCM_RIGHTS`), so
no file is left behind by a process that is killed, and it reports a process that has ended. Small
messages travel in the token.

A sender never waits for a receiver: it takes another buffer while the ones before are not read.
Receivers set a byte in front of a buffer when they have read it, and the sender uses it again.
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import select
import socket
import struct
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lightning_3d.compat.waits import add_wait

MOST_RANKS = 64
"""Most ranks that connect: each pair has a socket."""

_INLINE = 1024
"""Bytes of the largest message that travels in its token."""
_HEAD = 4096
"""Bytes in front of a buffer; one of them for each rank that reads it."""
_LAST_SECONDS = 10
"""Longest time to send what is left when connections are closed."""
_TOKEN = struct.Struct("<QQqI")
"""Channel, number of the message in it, bytes, number of the buffer (0: the message follows)."""

Key = tuple[int, int]
"""Channel and number of a message. Both sides count the messages of a channel."""


@dataclass
class Arrived:
    """A message that has arrived.

    Attributes:
        content: its bytes, in memory of the sender.
        flags: memory in front of it. place: byte in it that says that this rank has read the
            message.
    """

    content: Tensor
    flags: mmap.mmap | None = None
    place: int = 0

    def release(self) -> None:
        """Let the sender use the memory again."""
        if self.flags is not None:
            self.flags[self.place] = 1


class _Memory:
    """Memory of one message, mapped here."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.flags = mmap.mmap(descriptor, _HEAD + size)
        self.content = torch.frombuffer(self.flags, dtype=torch.uint8, offset=_HEAD)


class _Buffer(_Memory):
    """Memory that this rank writes messages to."""

    def __init__(self, number: int, size: int) -> None:
        descriptor = os.memfd_create("lightning_3d", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _HEAD + size)
        super().__init__(descriptor, size)
        self.number = number
        self.readers: Sequence[int] = ()
        self.known: set[int] = set()  # ranks that have mapped it

    def is_free(self) -> bool:
        return all(self.flags[rank] for rank in self.readers)


@dataclass
class _Peer:
    """Another rank.

    Attributes:
        connection: socket to it.
        arrived: messages that nobody has asked for yet.
        late: tokens for which the socket had no room, each with descriptors.
        maps: its buffers, by number.
        turn: guards the others; notified when a message arrives.
        is_read: whether a thread waits for the next token.
    """

    connection: socket.socket
    arrived: dict[Key, Arrived] = field(default_factory=dict)
    late: deque[tuple[bytes, list[int]]] = field(default_factory=deque)
    maps: dict[int, _Memory] = field(default_factory=dict)
    turn: threading.Condition = field(default_factory=threading.Condition)
    is_read: bool = False


class Neighbours:
    """Connections to the other ranks of this host.

    Args:
        rank: this rank.
        connections: sockets to other ranks, by rank.
        called: for each rank, the lower ranks to which it has a connection.
        timeout: longest wait for a message.
    """

    def __init__(
        self,
        rank: int,
        connections: dict[int, socket.socket],
        called: Sequence[Sequence[int]],
        timeout: timedelta,
    ) -> None:
        self.rank = rank
        self._called = called
        self._seconds = timeout.total_seconds()
        self._peers = {other: _Peer(connection) for other, connection in connections.items()}
        self._buffers: dict[int, list[_Buffer]] = {}
        self._made = 0
        self._filling = threading.Lock()
        for connection in connections.values():
            connection.setblocking(False)
        # others may still wait for a token for which a socket had no room
        atexit.register(self.close)

    def join(self, ranks: Sequence[int]) -> bool:
        """True if all pairs of these ranks are connected. All of them get the same answer."""
        return all(
            lower in self._called[upper] for lower in ranks for upper in ranks if lower < upper
        )

    def post(self, ranks: Sequence[int], key: Key, message: Tensor) -> None:
        """Send the bytes of a contiguous tensor on CPU, which may change as soon as this
        returns."""
        content = message.detach().reshape(-1).view(torch.uint8)
        if len(content) <= _INLINE:
            token = _TOKEN.pack(*key, len(content), 0) + content.numpy().tobytes()
            for rank in ranks:
                self._send(self._peers[rank], token, [])
            return
        with self._filling:
            buffer = self._buffer(len(content))
            buffer.content[: len(content)].copy_(content)
            buffer.readers = tuple(ranks)
            for rank in ranks:
                buffer.flags[rank] = 0
        token = _TOKEN.pack(*key, len(content), buffer.number)
        for rank in ranks:
            descriptors = [] if rank in buffer.known else [buffer.descriptor]
            buffer.known.add(rank)
            self._send(self._peers[rank], token, descriptors)

    def _buffer(self, size: int) -> _Buffer:
        """A buffer that everyone has read, with room for `size` bytes."""
        room = 1 << (size - 1).bit_length()
        of_size = self._buffers.setdefault(room, [])
        found = next((buffer for buffer in of_size if buffer.is_free()), None)
        if found is None:
            self._made += 1
            found = _Buffer(self._made, room)
            of_size.append(found)
        return found

    def _send(self, peer: _Peer, token: bytes, descriptors: list[int]) -> None:
        with peer.turn:
            peer.late.append((token, descriptors))
            self._send_late(peer)

    def _send_late(self, peer: _Peer) -> None:
        """Send tokens until the socket has no more room. A receiver that has ended is noticed when
        something is expected from it."""
        while peer.late:
            token, descriptors = peer.late[0]
            try:
                socket.send_fds(peer.connection, [token], descriptors)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                    raise
            peer.late.popleft()

    def take(self, rank: int, key: Key) -> Arrived:
        """Wait for a message of another rank; release it after reading.

        Raises:
            RuntimeError: the rank has ended, or nothing came in time.
        """
        peer = self._peers[rank]
        with peer.turn:
            while key not in peer.arrived:
                if peer.is_read:
                    peer.turn.wait()
                    continue
                peer.is_read = True
                peer.turn.release()
                try:
                    other, message = self._read(rank, peer)
                finally:
                    peer.turn.acquire()
                    peer.is_read = False
                    peer.turn.notify_all()
                peer.arrived[other] = message
            return peer.arrived.pop(key)

    def _read(self, rank: int, peer: _Peer) -> tuple[Key, Arrived]:
        """Wait for the next token of a rank."""
        started = time.perf_counter()
        while True:
            try:
                found = self._receive(peer)
                break
            except BlockingIOError:
                self._await(rank, peer, started)
            except ConnectionResetError:
                # the rank ended and left messages unread; its own may still be there
                continue
        add_wait(time.perf_counter() - started)
        if found is None:
            raise RuntimeError(f"Connection closed by peer: rank {rank}, on this host, has ended.")
        return found

    def _receive(self, peer: _Peer) -> tuple[Key, Arrived] | None:
        """Return the next message; None if the other rank has closed the connection.

        Raises:
            BlockingIOError: nothing is there.
            ConnectionResetError: the other rank has closed it, but messages may be left.
        """
        token, descriptors, _, _ = socket.recv_fds(peer.connection, _TOKEN.size + _INLINE, 1)
        if not token:
            return None
        channel, number, size, place = _TOKEN.unpack_from(token)
        if not place:
            content = bytearray(token[_TOKEN.size :])
            return (channel, number), Arrived(
                torch.frombuffer(content, dtype=torch.uint8)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
        if descriptors:
            room = os.fstat(descriptors[0]).st_size - _HEAD
            peer.maps[place] = _Memory(descriptors[0], room)
            os.close(descriptors[0])
        memory = peer.maps[place]
        return (channel, number), Arrived(memory.content[:size], memory.flags, self.rank)

    def _await(self, rank: int, peer: _Peer, started: float) -> None:
        """Wait until a rank has sent something, and send late tokens to all meanwhile."""
        left = started + self._seconds - time.perf_counter()
        if left <= 0:
            raise RuntimeError(f"Timed out after {self._seconds:.0f} s: rank {rank} sent nothing.")
        polled = select.poll()
        polled.register(peer.connection, select.POLLIN)
        full = [other for other in self._peers.values() if other.late]
        for other in full:
            mask = select.POLLIN | select.POLLOUT if other is peer else select.POLLOUT
            polled.register(other.connection, mask)
        polled.poll(left * 1000)
        for other in full:
            with other.turn:
                self._send_late(other)

    def close(self) -> None:
        """Send late tokens, and close the connections. What was sent can still be read. Called when
        the process exits, too."""
        deadline = time.monotonic() + _LAST_SECONDS
        while any(peer.late for peer in self._peers.values()) and time.monotonic() < deadline:
            self._exchange_late(deadline)
        self.let_go()

    def _exchange_late(self, deadline: float) -> None:
        """Send late tokens, and take what arrives meanwhile: the other rank may do the same."""
        polled, waiting = select.poll(), [peer for peer in self._peers.values() if peer.late]
        for peer in waiting:
            polled.register(peer.connection, select.POLLIN | select.POLLOUT)
        polled.poll(max(0.0, deadline - time.monotonic()) * 1000)
        for peer in waiting:
            with peer.turn:
                self._send_late(peer)
                with suppress(OSError):
                    found = self._receive(peer)
                    peer.arrived |= [found] if found else []

    def let_go(self) -> None:
        """Close this process's end of the connections without sending anything more."""
        atexit.unregister(self.close)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.connection.close()
        for buffers in self._buffers.values():
            for buffer in buffers:
                with suppress(OSError):
                    os.close(buffer.descriptor)
        self._buffers.clear()


def connect(
    rank: int, ranks: int, timeout: timedelta, gather: Callable[[Any], list[Any]]
) -> Neighbours | None:
    """Connect this rank to the others of its host. All ranks call it.

    Args:
        rank: this rank. ranks: number of ranks.
        timeout: longest wait for a message.
        gather: function that gathers an object from all ranks.

    Returns:
        The connections; None on all ranks where there are too many of them.
    """
    if not 1 < ranks <= MOST_RANKS:
        return None
    # "\0": a name without a file, seen on this host only
    address = f"\0lightning_3d-{uuid.uuid4().hex}"
    listener = _listen(address, ranks)
    with listener or nullcontext():
        addresses = gather(None if listener is None else address)
        lower = addresses[:rank] if listener is not None else []
        found = {
            other: one
            for other, where in enumerate(lower)
            if where is not None and (one := _call(where, rank)) is not None
        }
        called = gather(sorted(found))
        callers = sum(rank in reached for reached in called)
        while listener is not None and callers:
            connection, _ = listener.accept()
            if _is_own(connection):  # any user of this host can connect
                found[int(connection.recv(16))] = connection
                callers -= 1
    return Neighbours(rank, found, called, timeout)


def _listen(address: str, ranks: int) -> socket.socket | None:
    """Wait for connections; None where the system has no such sockets, or no memory that can be
    sent through them."""
    try:
        os.close(os.memfd_create("lightning_3d"))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(address)
        listener.listen(ranks)
    except (AttributeError, OSError):
        return None
    return listener


def _call(address: str, rank: int) -> socket.socket | None:
    """Connect to another rank; None if it is on another host."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(OSError):
        connection.connect(address)
        if _is_own(connection):
            connection.send(str(rank).encode())
            return connection
    connection.close()
    return None


def _is_own(connection: socket.socket) -> bool:
    """True if the process at the other end is one of this user."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(user == os.getuid())
