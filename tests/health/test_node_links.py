"""Who may connect to rank 0, and where it listens for the other nodes."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_3d.health import lost_nodes, node_links, processes
from lightning_3d.health.lost_nodes import LostNodes
from lightning_3d.health.node_links import Doorkeeper, Route, connect, listen_for, route_to_rank_0
from lightning_3d.health.processes import Process

TOKEN = bytes(range(16))
NOT_HERE = "192.0.2.7"  # an address for documentation


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as one:
        yield one
        for key in list(one.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]


def test_rank_0_listens_only_where_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that is not of this machine (a router's) leads to the one towards the node that uses it, never to all of them."""
    listeners, places = listen_for([Route("127.0.0.1", "127.0.0.1"), Route(NOT_HERE, "127.0.0.2"), Route("127.0.0.1", "127.0.0.1"), None])
    try:
        assert [listener.getsockname()[0] for listener in listeners] == ["127.0.0.1"]
        assert [place and place[0] for place in places] == ["127.0.0.1"] * 3 + [None]
    finally:
        for listener in listeners:
            listener.close()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert route_to_rank_0() == Route("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "not a name")
    assert route_to_rank_0() is None
    assert listen_for([Route(NOT_HERE, "not an address")]) == ([], [None])


def serve(selector: selectors.BaseSelector, seconds: float, until: list[int], count: int) -> None:
    deadline = time.monotonic() + seconds
    while len(until) < count and time.monotonic() < deadline:
        for key, _ in selector.select(0.05):
            key.data.answer(key.fileobj)


def test_silent_connections_hold_up_nobody(selector: selectors.BaseSelector) -> None:
    [listener], [place] = listen_for([Route("127.0.0.1", "127.0.0.1")])
    assert place is not None
    came: list[int] = []
    kept: list[socket.socket] = []

    def keep(connection: socket.socket, rank: int) -> None:
        kept.append(connection)
        came.append(rank)

    door = Doorkeeper(selector, [listener], TOKEN, [2, 4], keep)
    silent = [socket.create_connection(place) for _ in range(200)]
    route = Route("127.0.0.1", "127.0.0.1")
    wrong = [connect(route, place, bytes(16), 2), connect(route, place, TOKEN, 3)]
    right = [connect(route, place, TOKEN, rank) for rank in (2, 4)]
    serve(selector, 10.0, came, 2)
    assert sorted(came) == [2, 4], "within much less than a second for each of the silent ones"
    assert not selector.get_map(), "nobody else may connect"
    with pytest.raises(OSError):
        socket.create_connection(place, 1.0)
    door.close_if_late()
    for one in (*silent, *wrong, *right, *kept):
        one.close()


def test_listening_ends(selector: selectors.BaseSelector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_links, "CONNECT_SECONDS", 0.0)
    listeners, _ = listen_for([Route("127.0.0.1", "127.0.0.1")])
    door = Doorkeeper(selector, listeners, TOKEN, [1], lambda connection, rank: None)
    time.sleep(0.01)
    door.close_if_late()
    assert not selector.get_map()


def test_a_connection_made_after_the_end_of_the_fit_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit was over while this rank was still connecting."""
    ours, theirs = socket.socketpair()
    connecting, over = threading.Event(), threading.Event()

    def slow(*arguments: object) -> socket.socket:
        connecting.set()
        over.wait(20)
        return ours

    monkeypatch.setattr(lost_nodes, "connect", slow)
    monkeypatch.setattr(lost_nodes, "machine_name", lambda: "two")
    monkeypatch.setattr(lost_nodes, "route_to_rank_0", lambda: Route("127.0.0.1", "127.0.0.1"))
    answers = iter([[("one", "one"), ("two", "two")], [None, None], [([("127.0.0.1", 9)], TOKEN), None]])
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    watch = LostNodes.watch(None, 1, lambda mine: next(answers), 20.0, lambda: 0)  # type: ignore[arg-type]
    assert connecting.wait(10)
    monkeypatch.setattr(lost_nodes, "_LOOK_SECONDS", 0.01)
    watch.close()
    over.set()
    assert watch._thread is not None
    watch._thread.join(10)
    theirs.settimeout(10)
    assert theirs.recv(1) == b"", "it is closed"
    assert errors == [] and not watch._thread.is_alive()
    theirs.close()


def test_processes_of_machines_with_equal_names_are_distinguished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another machine's process has the number of one here: this one is neither described nor killed."""
    here = Process.own()
    boot = tmp_path / "boot_id"
    boot.write_text("another machine\n")
    monkeypatch.setattr(processes, "_BOOT_ID", boot)
    there = Process.own()
    assert (there.host, there.pid, there.started) == (here.host, here.pid, here.started)
    monkeypatch.undo()
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    there.kill_if_here()
    assert killed == [] and "the machine is lost" in there.why_silent()
    here.kill_if_here()
    assert killed == [os.getpid()] and "runs" in here.why_silent()


class Ended(Exception):
    """In place of the end of the process."""


class Reporter:
    reason = ""

    def end_all(self, text: str) -> None:
        raise Ended(text)


def two_watches(monkeypatch: pytest.MonkeyPatch, beats: Iterator[int]) -> tuple[LostNodes, socket.socket]:
    """A watch of rank 0, which looks when it is asked to, and the end of rank 2's connection to it."""
    monkeypatch.setattr(lost_nodes, "GONE_SECONDS", 0.0)
    monkeypatch.setattr(lost_nodes, "_LOOK_SECONDS", 0.01)
    watch = LostNodes(Reporter(), 0, ["a", "a", "b", "b"], [0, 0, 2, 2], 20.0, lambda: next(beats))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        watch._keep(server.accept()[0], 2)
    return watch, theirs


def test_f52_a_rank_on_another_node_that_ends_without_a_good_bye_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node still answers. Ranks on GPUs may wait for it forever."""
    watch, theirs = two_watches(monkeypatch, iter([7, 7]))
    theirs.close()
    with pytest.raises(Ended, match=r"Rank 2 on the node b has ended and reported no error .* Rank 0 has made no progress"):
        for _ in range(100):
            watch._look()
    watch.close()


def test_a_lost_connection_does_not_end_a_run_that_makes_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, theirs = two_watches(monkeypatch, iter(range(4)))
    theirs.close()
    for _ in range(20):
        watch._look()
    assert watch._gone == {}
    watch.close()


def test_a_connection_that_was_never_accepted_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit of rank 0 was over before. Only the other connection belongs to a rank that was killed."""
    monkeypatch.setattr(lost_nodes, "GONE_SECONDS", 1000.0)
    monkeypatch.setattr(lost_nodes, "_LOOK_SECONDS", 0.01)
    watch = LostNodes(Reporter(), 2, ["a", "a", "b", "b"], [0, 0, 2, 2], 20.0, lambda: 0)  # type: ignore[arg-type]
    for greeting, gone in ((b"", []), (b"+", [0])):
        with socket.create_server(("127.0.0.1", 0)) as server:
            watch._keep(socket.create_connection(server.getsockname()), 0)
            theirs, _ = server.accept()
            theirs.send(greeting)
            theirs.close()
        for _ in range(20):
            watch._look()
        assert list(watch._gone) == gone
    watch.close()


def test_a_rank_that_ends_in_order_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, theirs = two_watches(monkeypatch, iter([7, 7]))
    other = LostNodes(Reporter(), 2, ["a", "a", "b", "b"], [0, 0, 2, 2], 20.0, lambda: 0)  # type: ignore[arg-type]
    other._keep(theirs, 0)
    other.close()
    for _ in range(20):
        watch._look()
    assert watch._gone == {} and not watch._selector.get_map()
    watch.close()
