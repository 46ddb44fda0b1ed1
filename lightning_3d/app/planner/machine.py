"""Rates of a cluster's GPUs and links, and the share of them that software reaches. Pure Python."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, gcd, prod
from typing import NamedTuple

from lightning_3d.layout.layout import Layout

_GROUPING = re.compile(r"(?<![A-Z0-9])G?[HB](20|100|200|300|800)(?![0-9])", re.IGNORECASE)
"""Names of GPUs with compute capability 9.0 or 10.x: Hopper, and the types of Blackwell for data
centers."""


@dataclass(frozen=True)
class Efficiency:
    """Shares of a vendor's rates that software reaches. `matmul` and `attention` are calibrated for
    each type of GPU.

    Attributes:
        matmul: share of the peak of its precision that a large matrix product reaches.
        attention: share of the peak that fused attention (FlashAttention-2) reaches.
        memory: share of memory bandwidth that operations bound by it reach: the mean of STREAM's
            triad on A100 40 GB (1,360 of 1,555 GB/s), A100 80 GB (1,759 of 2,039) and H100 PCIe
            (1,832 of 2,039), from te42kyfo/gpu-benches: `gpu-stream/a100_40.txt`,
            `cuda-stream/a100_80.txt` and `cuda-stream/h100_pcie.txt`.
        link: share of the bandwidth between GPUs of a node that a collective reaches. NCCL 2.30
            (src/graph/topo.h) takes 20 of 25 GB/s of a link on A100, 20.6 of 25 on H100, and 40.1
            of 50 on B200.
        network: share of the bandwidth between nodes. NCCL reaches 46 to 48 GB/s of a port of 50
            (NVIDIA/nccl-tests, issue 290).
        kernel: additional seconds of each matrix product: launch, first loads and last wave. An
            estimate without a measurement, the same for all GPUs. Without it, the median error of
            dense published runs rises by 0.1 points, and that of mixtures falls by 0.9.
    """

    matmul: float
    attention: float
    memory: float = 0.88
    link: float = 0.8
    network: float = 0.93
    kernel: float = 4e-6


class Protocol(NamedTuple):
    """A way in which a library sends the messages of a ring.

    Attributes:
        link: latency within a node, as a multiple of that of the smallest messages.
        network: the same between nodes.
        share: share of the bandwidth that is left for data.
    """

    link: float
    network: float
    share: float


NCCL = (
    Protocol(1.0, 1.0, 0.5),
    Protocol(1.9 / 0.6, 4.0 / 2.7, 0.92),
    Protocol(3.4 / 0.6, 14.0 / 2.7, 1.0),
)
"""LL, LL128 and Simple, of which NCCL takes the fastest for each message: latencies and shares of
its own model (NCCL 2.30, src/graph/tuning.cc, `hwLatencies` of rings and the factors of
`busBw`)."""

ONE = (Protocol(1.0, 1.0, 1.0),)
"""A library with a single protocol, such as gloo."""

MESSAGES: dict[str, Callable[[int], tuple[float, float]]] = {
    "all_gather": lambda n: (n - 1, (n - 1) / n),
    "reduce_scatter": lambda n: (n - 1, (n - 1) / n),
    "all_reduce": lambda n: (2 * (n - 1), 2 * (n - 1) / n),
    "all_to_all": lambda n: (1, (n - 1) / n),
    "send": lambda n: (1, 1),
}
"""Of each collective on n ranks: messages one after the other, and bytes that leave a rank, as a
share of its size."""


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
        peak32: the same in float32: in TF32 if the run multiplies in it
            (`trainer.float32_matmul_precision`).
        link: bytes a second of one GPU, one way, within a node.
        network: bytes a second of one GPU, one way, between nodes.
        link_latency: seconds of one message within a node.
        network_latency: seconds of one message between nodes.
        efficiency: shares of these rates that software reaches.
        peak4: the same as `peak8` in 4 bits (NVFP4); 0 for a GPU that has no such products, which
            then run in float8.
        protocols: of rings; the fastest is taken for each message.
        pod_gpus: GPUs of each pod: neighbouring nodes between which all ports may send at their
            full rate; 0: all nodes are in one.
        oversubscription: bytes a second that the ports of a pod have, per byte a second that may
            leave it.
        collectives: by the name of a collective in `MESSAGES`: (seconds of a message, bytes a
            second) as measured within a node. Where the ranks of a node share memory, each
            collective copies and sums in its own way (`parallel/host_channel.py`). Those that are
            not named take what the links do.
        unit: word for what a rank runs on, "GPU" or "CPU rank". In all names and descriptions here,
            a GPU is such a unit.
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
    peak4: float = 0.0
    protocols: tuple[Protocol, ...] = NCCL
    pod_gpus: int = 0
    oversubscription: float = 1.0
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    unit: str = "GPU"

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def peak_of(self, precision: str) -> float:
        """Return the operations a second of matrix products in a precision, as the vendor states
        them."""
        peaks = {"fp4": self.peak4 or self.peak8, "fp8": self.peak8, "fp32": self.peak32}
        return peaks.get(precision, self.peak)

    def matmul_rate(self, precision: str) -> float:
        """Return the operations a second that large matrix products reach."""
        return self.peak_of(precision) * self.efficiency.matmul

    def group(self, layout: Layout, axes: tuple[str, ...]) -> Group:
        """Return the ranks along these axes that communicate with rank 0."""
        return group(layout, axes, self.gpus_per_node, self.pod_gpus)

    def shard_groups(self, layout: Layout, shards: int) -> tuple[Group, Group]:
        """Return (ranks over which ZeRO shards, ranks with the same shard) of rank 0; `shards`: see
        `shard_groups`."""
        return shard_groups(layout, shards, self.gpus_per_node, self.pod_gpus)

    def expert_groups(self, layout: Layout, shards: int) -> tuple[Group, Group]:
        """Return (ranks that share the experts of a stage, ranks over which ZeRO shards an expert);
        see `expert_groups`."""
        return expert_groups(layout, shards, self.gpus_per_node, self.pod_gpus)

    @cached_property
    def groups_products(self) -> bool:
        """True if torch multiplies bfloat16 matrices of several experts in one kernel: with compute
        capability 9.0 and 10.x (`_grouped_mm_cuda` in torch's
        aten/src/ATen/native/cuda/GroupedBlas.cpp). On other GPUs and on CPUs, it multiplies them
        one by one."""
        return _GROUPING.search(self.gpu) is not None

    @property
    def memory_rate(self) -> float:
        """Bytes a second that operations bound by memory reach."""
        return self.bandwidth * self.efficiency.memory


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Attributes:
        size: how many.
        local: how many of them share a node.
        near: over how many nodes those in one pod are spread; 0: all are in one pod.
    """

    size: int
    local: int
    near: int = 0

    @property
    def nodes(self) -> int:
        return ceil(self.size / self.local)


@lru_cache(maxsize=4096)
def group(layout: Layout, axes: tuple[str, ...], gpus_per_node: int, pod_gpus: int = 0) -> Group:
    """Return the group of rank 0 along these axes; ranks fill nodes in order."""
    return _group(
        [(layout.size(axis), _stride(layout, axis)) for axis in axes], gpus_per_node, pod_gpus
    )


@lru_cache(maxsize=4096)
def shard_groups(
    layout: Layout, shards: int, gpus_per_node: int, pod_gpus: int = 0
) -> tuple[Group, Group]:
    """Return (ranks over which ZeRO shards, ranks with the same shard) of rank 0.

    Args:
        shards: neighbouring data-parallel indices of a shard group.
    """
    stride = _stride(layout, "dp")
    inside = _group([(layout.cp, _stride(layout, "cp")), (shards, stride)], gpus_per_node, pod_gpus)
    return inside, _group([(layout.dp // shards, stride * shards)], gpus_per_node, pod_gpus)


@lru_cache(maxsize=4096)
def expert_groups(
    layout: Layout, shards: int, gpus_per_node: int, pod_gpus: int = 0
) -> tuple[Group, Group]:
    """Return (ranks that share the experts of a stage, ranks that have the same experts and are in
    one shard group) of rank 0.

    The first are `ep` neighbours where the ranks of a stage are numbered with tp innermost, then
    cp, then dp; the second are every `ep`-th of those numbers (`Layout.expert_groups`,
    `Layout.expert_shard_groups`).

    Args:
        shards: neighbouring data-parallel indices of a shard group.
    """
    sharing, same, missing = [], [], layout.ep
    for axis, degree in (("tp", layout.tp), ("cp", layout.cp), ("dp", shards)):
        taken, stride = gcd(degree, missing), _stride(layout, axis)
        sharing.append((taken, stride))
        same.append((degree // taken, stride * taken))
        missing //= taken
    return _group(sharing, gpus_per_node, pod_gpus), _group(same, gpus_per_node, pod_gpus)


def on_one_node(layout: Layout, shards: int, gpus_per_node: int) -> bool:
    """Return whether each shard group is on one node. Ranks fill nodes in order, so blocks of ranks
    must divide a node."""
    blocks = [
        size * _stride(layout, axis)
        for axis, size in (("cp", layout.cp), ("dp", shards))
        if size > 1
    ]
    return all(gpus_per_node % block == 0 for block in blocks)


def _stride(layout: Layout, axis: str) -> int:
    """Return the difference of the ranks of two neighbours along an axis."""
    return prod(layout.size(inner) for inner in layout.order[: layout.order.index(axis)])


def _group(parts: Sequence[tuple[int, int]], gpus_per_node: int, pod_gpus: int) -> Group:
    """Return the group of ranks that differ in (degree, stride) of each part."""
    size = prod(degree for degree, _ in parts)
    local = _within(parts, gpus_per_node)
    found = (
        Group(size, local, _within(parts, pod_gpus) // local) if pod_gpus else Group(size, local)
    )
    return found if found.near < found.nodes else Group(size, local)


def _within(parts: Sequence[tuple[int, int]], gpus: int) -> int:
    """Count the ranks among the first `gpus`."""
    return prod(max(1, min(degree, gpus // stride)) for degree, stride in parts)


def ring_rate(machine: Machine, ranks: Group) -> float:
    """Return the bytes a second that leave each rank in a ring. Between nodes, each member in a
    node uses the network port of its GPU.

    A ring leaves each pod once. All groups of these axes do so at the same time: in each pod one
    group for each `ranks.near` nodes.
    """
    inside = machine.link * machine.efficiency.link
    if ranks.nodes == 1:
        return inside
    return min(inside, _network(machine, ranks.near) * ranks.local)


def _network(machine: Machine, near: float) -> float:
    """Return the bytes a second of each port, if one of `near` nodes of a pod sends to another pod
    at a time; 0: none does."""
    rate = machine.network * machine.efficiency.network
    return rate * min(1.0, near / machine.oversubscription) if near else rate


def gather(machine: Machine, ranks: Group, size: float) -> float:
    """Predict an all-gather of `size` bytes in total: (n - 1) / n of them pass each rank in n - 1
    steps of a ring (Thakur et al., "Optimization of collective communication operations in MPICH",
    2005)."""
    n = ranks.size
    if n == 1:
        return 0.0
    if (seconds := _measured(machine, "all_gather", ranks, size)) is not None:
        return seconds
    inside, between = (
        (n - ranks.nodes) * machine.link_latency,
        (ranks.nodes - 1) * machine.network_latency,
    )
    moved = (n - 1) / n * size / ring_rate(machine, ranks)
    return min(
        each.link * inside + each.network * between + moved / each.share
        for each in machine.protocols
    )


def reduce_scatter(machine: Machine, ranks: Group, size: float) -> float:
    """Predict a reduce-scatter of `size` bytes in total: in a ring it takes as long as an
    all-gather."""
    seconds = _measured(machine, "reduce_scatter", ranks, size)
    return gather(machine, ranks, size) if seconds is None else seconds


def all_reduce(machine: Machine, ranks: Group, size: float) -> float:
    """Predict the seconds of an all-reduce: in a ring, a reduce-scatter and an all-gather."""
    seconds = _measured(machine, "all_reduce", ranks, size)
    return 2 * gather(machine, ranks, size) if seconds is None else seconds


def _measured(machine: Machine, name: str, ranks: Group, size: float) -> float | None:
    """Predict a collective as it was measured within a node; None if it was not, or if the ranks
    are on several nodes."""
    found = machine.collectives.get(name) if ranks.nodes == 1 else None
    if found is None:
        return None
    if ranks.size == 1:
        return 0.0
    messages, share = MESSAGES[name](ranks.size)
    return messages * found[0] + share * size / found[1]


def all_to_all(machine: Machine, ranks: Group, size: float) -> float:
    """Predict the seconds in which each rank sends `size` bytes, in equal parts, to all ranks of
    the group: over links within the node, and over the rank's own network port to other nodes, of
    which those to other pods share what leaves the pod."""
    n = ranks.size
    if n == 1:
        return 0.0
    if (seconds := _measured(machine, "all_to_all", ranks, size)) is not None:
        return seconds
    inside = size * (ranks.local - 1) / n / (machine.link * machine.efficiency.link)
    outside = size * (n - ranks.local) / n / _network(machine, 0)
    if ranks.near:
        outside = max(outside, size * (n - ranks.near * ranks.local) / n / _network(machine, 1))
    return max(inside, outside) + machine.network_latency * (ranks.nodes > 1) + machine.link_latency


def send(machine: Machine, layout: Layout, size: float) -> float:
    """Predict the seconds of a message to the next pipeline stage, where it takes longest. One
    stage of a pod sends to another pod."""
    ranks = machine.group(layout, ("pp",))
    if (seconds := _measured(machine, "send", ranks, size)) is not None:
        return seconds
    if ranks.nodes > 1:
        near = max(1.0, machine.pod_gpus / _stride(layout, "pp")) if ranks.near else 0
        return machine.network_latency + size / _network(machine, near)
    return machine.link_latency + size / (machine.link * machine.efficiency.link)
