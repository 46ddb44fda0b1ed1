"""Ranks of one host communicate through shared memory, with the results of arithmetic on one
process."""

import atexit
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sums_and_gathers import check, sums

from lightning_3d.compat.flight_recorder import recorded_collectives
from lightning_3d.layout import Layout
from lightning_3d.parallel import gloo_exchange as exchange
from lightning_3d.parallel import host_channel, host_memory
from lightning_3d.parallel.collectives import all_reduce_flat
from lightning_3d.parallel.mesh import Mesh

LARGE = 100_003
"""Numbers of a tensor that ranks sum in two steps; no power of two, and no multiple of the
ranks."""


@contextmanager
def shared(seconds: float = 60) -> Iterator[host_channel.HostChannel]:
    """Share memory over all ranks."""
    host_channel.share([dist.group.WORLD], timedelta(seconds=seconds))
    channel = host_channel.channel_of(None)
    assert channel is not None
    yield channel
    host_channel.unshare()


def whole_numbers(numel: int) -> list[torch.Tensor]:
    """One tensor of each rank, whose sums are exact."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(-8, 9, (numel,), generator=generator).float()
        for _ in range(dist.get_world_size())
    ]


def sums_and_gathers() -> torch.Tensor:
    with shared():
        for numel in (0, 1, 300, LARGE):
            check(numel)
        return sums()[0]


def other_collectives() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for numel in (3, LARGE):
        everyone = whole_numbers(numel)
        with shared():
            found = [one.clone() for one in everyone]
            works = [
                exchange.start_reduce(found[rank], 1, None),
                exchange.start_all_reduce(total := everyone[rank].clone(), None),
            ]
            works += [exchange.start_broadcast(told := everyone[rank].clone(), ranks - 1, None)]
            rows = [index + 1 for index in range(ranks)]  # rank r gets r + 1 rows of each
            mine = torch.full((sum(rows), numel), float(rank))
            received = torch.empty(ranks * (rank + 1), numel)
            works += [exchange.start_all_to_all(received, mine, [rank + 1] * ranks, rows, None)]
            for work in works:
                work.wait()
        assert torch.equal(total, sum(everyone[1:], start=everyone[0]))
        assert rank != 1 or torch.equal(found[rank], total)
        assert torch.equal(told, everyone[-1])
        assert torch.equal(
            received,
            torch.arange(float(ranks)).repeat_interleave(rank + 1).unsqueeze(1).expand(-1, numel),
        )


def many_messages(numel: int, count: int) -> None:
    """Both ranks send everything before they receive anything, in another order."""
    rank = dist.get_rank()
    with shared():
        for index in range(count):
            message = torch.full((numel,), float(index))
            assert exchange.isend(message, 1 - rank, None).is_completed()
            message.fill_(-1)  # what was sent does not change
        arriving = [torch.empty(numel) for _ in range(count)]
        works = [exchange.irecv(buffer, 1 - rank, None) for buffer in arriving]
        order = [*range(1, count, 2), *range(0, count, 2)]
        for index in order:
            works[index].wait()
        assert [buffer.unique().tolist() for buffer in arriving] == [
            [float(index)] for index in range(count)
        ]


def memory_is_used_again() -> int:
    with shared() as channel:
        for step in range(20):
            x = torch.full((LARGE,), float(step))
            all_reduce_flat(x, None)
        return sum(map(len, channel._neighbours._buffers.values()))


def ended_rank() -> str:
    with shared():
        if dist.get_rank() == 1:
            return ""
        with pytest.raises(RuntimeError) as error:
            all_reduce_flat(torch.ones(3), None)
        return str(error.value)


def late_rank() -> tuple[str, list[Any]]:
    with shared(seconds=1), patch.object(host_channel, "unshare", lambda *args: None):
        if dist.get_rank() == 1:
            time.sleep(3)
            return "", []
        with pytest.raises(RuntimeError) as error:
            all_reduce_flat(torch.ones(3, 2), None)
        return str(error.value), [
            (call.kind, call.shape, call.done)
            for call in recorded_collectives()
            if "shared" in call.group
        ]


def other_sizes(numels: tuple[int, int], collective: str) -> str:
    """The ranks disagree on the size, which torch would stretch or cut without an error."""
    x = torch.ones(numels[dist.get_rank()])
    with shared(), pytest.raises(RuntimeError) as error:
        if collective == "all_reduce":
            all_reduce_flat(x, None)
        else:
            works = [
                exchange.isend(x, 1 - dist.get_rank(), None),
                exchange.irecv(x.clone(), 1 - dist.get_rank(), None),
            ]
            works[1].wait()
    return str(error.value)


def child_lets_go() -> None:
    with shared():
        child = os.fork()
        if child == 0:
            os._exit(int(host_channel.channel_of(None) is not None))
        assert os.waitpid(child, 0)[1] == 0
        all_reduce_flat(x := torch.ones(3), None)  # this process has not
        assert x.tolist() == [2, 2, 2]


def sends_and_exits(connection: socket.socket, count: int, posted: int) -> NoReturn:
    """Send more than the socket holds, and exit without closing."""
    atexit._clear()
    neighbours = host_memory.Neighbours(0, {1: connection}, [[], [0]], timedelta(seconds=20))
    for index in range(count):
        neighbours.post([1], (7, index), torch.tensor([index]))
    os.write(posted, len(neighbours._peers[1].late).to_bytes(4, "little"))
    atexit._run_exitfuncs()  # what the interpreter does when it ends
    os._exit(0)


def two_hosts() -> list[bool]:
    """Ranks 0 and 1 cannot reach 2 and 3."""
    call = host_memory._call

    def own_host_only(address: str, rank: int) -> Any:
        return call(address, rank) if host_of[address] == rank // 2 else None

    host_of: dict[str, int] = {}
    gather = host_channel._gather

    def gathered(mine: Any) -> list[Any]:
        found = gather(mine)
        host_of.update({one: rank // 2 for rank, one in enumerate(found) if isinstance(one, str)})
        return found

    with (
        patch.object(host_memory, "_call", own_host_only),
        patch.object(host_channel, "_gather", gathered),
    ):
        mesh = Mesh(Layout(tp=2, dp=2))
        mesh.warm_up()
    for group in (mesh.group("tp"), mesh.group("dp"), None):
        all_reduce_flat(x := torch.ones(5), group)
        assert x.tolist() == [dist.get_world_size(group)] * 5
    found = [host_channel.channel_of(mesh.group(axis)) is not None for axis in ("tp", "dp")]
    mesh.destroy()
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_are_those_of_one_process(ranks: int) -> None:
    first, *others = run_ranks(sums_and_gathers, ranks)
    assert all(torch.equal(first, other) for other in others)


def test_reduce_broadcast_and_exchange_of_rows() -> None:
    run_ranks(other_collectives, 3)


@pytest.mark.parametrize(("numel", "count"), [(10, 2000), (LARGE, 20)])
def test_a_sender_waits_for_nobody_and_messages_keep_their_order(numel: int, count: int) -> None:
    run_ranks(many_messages, 2, numel, count)


def test_memory_that_was_read_is_used_again() -> None:
    assert max(run_ranks(memory_is_used_again, 2)) <= 3


def test_a_rank_that_has_ended_is_named() -> None:
    assert (
        run_ranks(ended_rank, 2)[0] == "Connection closed by peer: rank 1, on this host, has ended."
    )


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_and_the_call_is_recorded() -> None:
    message, calls = run_ranks(late_rank, 2)[0]
    assert message == "Timed out after 1 s: rank 1 sent nothing."
    assert calls[-1] == ("all_reduce", "(3, 2) float32", False)


@pytest.mark.parametrize("collective", ["all_reduce", "message"])
@pytest.mark.parametrize("numels", [(1, 500), (LARGE, 7)])
def test_ranks_that_disagree_on_the_size_are_refused(
    numels: tuple[int, int], collective: str
) -> None:
    for rank, message in enumerate(run_ranks(other_sizes, 2, numels, collective)):
        assert (
            f"Rank {1 - rank} sent {4 * numels[1 - rank]} bytes where this rank expects"
            f" {4 * numels[rank]}" in message
        )


def test_a_child_process_holds_no_connection() -> None:
    run_ranks(child_lets_go, 2)


def test_a_process_that_exits_sends_what_a_full_socket_held_back() -> None:
    count = 4000
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    late, posted = os.pipe()
    child = os.fork()
    if child == 0:
        mine.close()
        sends_and_exits(its, count, posted)
    its.close()
    assert int.from_bytes(os.read(late, 4), "little") > count // 2
    receiver = host_memory.Neighbours(1, {0: mine}, [[], [0]], timedelta(seconds=20))
    found = [int(receiver.take(0, (7, index)).content.view(torch.int64)) for index in range(count)]
    receiver.close()
    assert found == list(range(count))
    assert os.waitpid(child, 0)[1] == 0


def test_ranks_of_several_hosts_use_the_network_between_them() -> None:
    assert run_ranks(two_hosts, 4) == [[True, False]] * 4
