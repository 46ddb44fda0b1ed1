"""Rings of NCCL: which protocol the planner takes for a message, and how a gather slows down with
the number of ranks."""

from dataclasses import replace

import pytest

from lightning_3d.app.planner.machine import (
    ONE,
    Efficiency,
    Group,
    Machine,
    all_reduce,
    all_to_all,
    gather,
    reduce_scatter,
    send,
)
from lightning_3d.layout import Layout

MACHINE = Machine(
    "",
    128,
    8,
    80e9,
    1e12,
    1e14,
    1e14,
    1e14,
    450e9,
    50e9,
    0.6e-6,
    2.7e-6,
    Efficiency(1.0, 1.0, link=1.0, network=1.0),
)


def by_hand(nodes: int, size: float) -> dict[str, float]:
    """Seconds of an all-gather over nodes of 8 GPUs, with the latencies of rings in NCCL 2.30
    (`hwLatencies`, in microseconds)."""
    ranks, rate = 8 * nodes, 450e9 if nodes == 1 else 400e9
    moved = (ranks - 1) / ranks * size / rate
    return {
        name: ((ranks - nodes) * link + (nodes - 1) * network) * 1e-6 + moved / share
        for name, link, network, share in (
            ("LL", 0.6, 2.7, 0.5),
            ("LL128", 1.9, 4.0, 0.92),
            ("Simple", 3.4, 14.0, 1.0),
        )
    }


@pytest.mark.parametrize(
    ("nodes", "size", "fastest"),
    [
        (1, 1e5, "LL"),
        (1, 1e7, "LL128"),
        (1, 1e9, "Simple"),
        (16, 1e6, "LL"),
        (16, 1e9, "LL128"),
        (16, 1e10, "Simple"),
        (128, 1e7, "LL"),
        (128, 2e9, "LL128"),
        (128, 2e11, "Simple"),
    ],
)
def test_a_ring_takes_the_fastest_protocol(nodes: int, size: float, fastest: str) -> None:
    seconds = by_hand(nodes, size)
    assert min(seconds, key=lambda name: seconds[name]) == fastest
    ranks = MACHINE.group(Layout(dp=8 * nodes), ("dp",))
    assert gather(MACHINE, ranks, size) == pytest.approx(seconds[fastest], rel=1e-6)
    assert all_reduce(MACHINE, ranks, size) == pytest.approx(2 * seconds[fastest], rel=1e-6)


def test_gathers_over_many_ranks_lose_bandwidth() -> None:
    """As much data in total takes longer over more nodes; with the latency of small messages it
    would take nearly as long."""
    size = 2e9  # a block of a model of 70 billion parameters, in 16 bits
    few, many = (
        gather(MACHINE, MACHINE.group(Layout(dp=ranks), ("dp",)), size) for ranks in (16, 1024)
    )
    plain = replace(MACHINE, protocols=ONE)
    few_plain, many_plain = (
        gather(plain, plain.group(Layout(dp=ranks), ("dp",)), size) for ranks in (16, 1024)
    )
    assert many / few > 1.5 > 1.3 > many_plain / few_plain


def test_collectives_that_were_measured_within_a_node_take_as_long_there() -> None:
    """On a CPU, ranks share memory, and a reduce-scatter copies and sums more than an
    all-gather."""
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
    measured = replace(
        MACHINE, collectives={name: (1e-4, 1e9 * place) for place, name in enumerate(names, 1)}
    )
    node, nodes, size = Group(4, 4), Group(16, 8), 1e8
    assert gather(measured, node, size) == pytest.approx(3e-4 + 0.75 * size / 1e9)
    assert reduce_scatter(measured, node, size) == pytest.approx(3e-4 + 0.75 * size / 2e9)
    assert all_reduce(measured, node, size) == pytest.approx(6e-4 + 1.5 * size / 3e9)
    assert all_to_all(measured, node, size) == pytest.approx(1e-4 + 0.75 * size / 4e9)
    assert send(measured, Layout(pp=4), size) == pytest.approx(1e-4 + size / 5e9)
    for function in (gather, reduce_scatter, all_reduce, all_to_all):
        assert function(measured, Group(1, 1), size) == 0.0
        assert function(measured, nodes, size) == function(MACHINE, nodes, size)
    assert reduce_scatter(MACHINE, node, size) == gather(MACHINE, node, size)
