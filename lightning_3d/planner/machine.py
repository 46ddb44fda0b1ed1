"""Rates of a cluster's GPUs and links, and the share of them that software reaches. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from lightning_3d.layout.layout import Layout


@dataclass(frozen=True)
class Efficiency:
    """Shares of a vendor's rates that software reaches: calibrated constants, one set for each type of GPU.

    Attributes:
        matmul: share of the peak that a large matrix product reaches.
        matmul8: the same in float8, of its own peak.
        memory: share of memory bandwidth that operations bound by it reach.
        attention: share of the peak that fused attention reaches.
        kernel: additional seconds of each matrix product (launch, ramp-up, last wave).
        link: share of the bandwidth between GPUs of a node that a collective reaches.
        network: share of the bandwidth between nodes, for two of them.
        crowding: how the share between nodes falls with their number: network / (1 + crowding * log2(nodes / 2)).
        exposed: share of communication inside layers (tensor- and expert-parallel) that does not overlap with computation.
    """

    matmul: float
    matmul8: float
    memory: float
    attention: float
    kernel: float
    link: float
    network: float
    crowding: float
    exposed: float


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes.

    Attributes:
        gpu: name of the GPU.
        nodes: number of nodes.
        gpus_per_node: GPUs of each node.
        memory: bytes of one GPU.
        bandwidth: memory bandwidth of one GPU, in bytes a second.
        peak: operations a second of matrix products in 16 bits.
        peak8: the same in float8.
        peak32: the same in float32.
        link: bytes a second of one GPU, one way, within a node.
        network: bytes a second of one GPU, one way, between nodes.
        link_latency: seconds of one message within a node.
        network_latency: seconds of one message between nodes.
        efficiency: shares of these rates that software reaches.
    """

    gpu: str
    nodes: int
    gpus_per_node: int
    memory: float
    bandwidth: float
    peak: float
    peak8: float
    peak32: float
    link: float
    network: float
    link_latency: float
    network_latency: float
    efficiency: Efficiency

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def matmul_rate(self, precision: str) -> float:
        """Operations a second that large matrix products reach."""
        if precision == "fp8":
            return self.peak8 * self.efficiency.matmul8
        return (self.peak32 if precision == "fp32" else self.peak) * self.efficiency.matmul

    @property
    def memory_rate(self) -> float:
        """Bytes a second that operations bound by memory reach."""
        return self.bandwidth * self.efficiency.memory


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: how many, how many of them share a node, and over how many nodes they are spread."""

    size: int
    local: int

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.local)


@lru_cache(maxsize=4096)
def group(layout: Layout, axes: tuple[str, ...], gpus_per_node: int) -> Group:
    """Return the group of rank 0 along these axes; ranks fill nodes in order."""
    size, stride, local = 1, 1, 1
    for axis in layout.order:
        degree = layout.size(axis)
        if axis in axes:
            size *= degree
            local *= max(1, min(degree, gpus_per_node // stride))
        stride *= degree
    return Group(size, min(size, local))


def ring_rate(machine: Machine, ranks: Group) -> float:
    """Return the bytes a second that leave each rank in a ring. Between nodes, each member in a node uses the network port of its GPU."""
    efficiency = machine.efficiency
    inside = machine.link * efficiency.link
    if ranks.nodes == 1:
        return inside
    share = efficiency.network / (1 + efficiency.crowding * max(0.0, log2(ranks.nodes / 2)))
    return min(inside, machine.network * share * ranks.local)


def gather(machine: Machine, ranks: Group, size: float) -> float:
    """Predict an all-gather or a reduce-scatter of `size` bytes in total: (n - 1) / n of them pass each rank in n - 1 steps of a ring
    (Thakur et al., "Optimization of collective communication operations in MPICH", 2005)."""
    n = ranks.size
    if n == 1:
        return 0.0
    steps = (n - ranks.nodes) * machine.link_latency + (ranks.nodes - 1) * machine.network_latency
    return steps + (n - 1) / n * size / ring_rate(machine, ranks)


def all_reduce(machine: Machine, ranks: Group, size: float) -> float:
    """Predict the seconds of an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * gather(machine, ranks, size)


def all_to_all(machine: Machine, ranks: Group, size: float) -> float:
    """Predict the seconds in which each rank sends `size` bytes, in equal parts, to all ranks of the group: over links within the node, and
    over the rank's own network port to other nodes."""
    n = ranks.size
    if n == 1:
        return 0.0
    efficiency = machine.efficiency
    inside = size * (ranks.local - 1) / n / (machine.link * efficiency.link)
    share = efficiency.network / (1 + efficiency.crowding * max(0.0, log2(max(2, ranks.nodes) / 2)))
    outside = size * (n - ranks.local) / n / (machine.network * share)
    return max(inside, outside) + machine.network_latency * (ranks.nodes > 1) + machine.link_latency


def send(machine: Machine, across_nodes: bool, size: float) -> float:
    """Predict the seconds of a message between two ranks."""
    if across_nodes:
        return machine.network_latency + size / (machine.network * machine.efficiency.network)
    return machine.link_latency + size / (machine.link * machine.efficiency.link)
