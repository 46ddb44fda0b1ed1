"""Networks that are slower between pods of nodes than within one: the planner's rates against all
flows at once, counted one by one."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from math import prod

import pytest

from lightning_3d.app.config.cluster import ClusterConfig, Link, PeakFlops
from lightning_3d.app.planner.advice import machine_of
from lightning_3d.app.planner.machine import (
    Efficiency,
    Machine,
    all_to_all,
    gather,
    ring_rate,
    send,
)
from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout

GPUS, POD = 4, 16
PORT = 1e9
MACHINE = Machine(
    "",
    16,
    GPUS,
    80e9,
    1e12,
    1e14,
    1e14,
    1e14,
    1e15,
    PORT,
    0.0,
    0.0,
    Efficiency(1.0, 1.0, link=1.0, network=1.0),
)
PODS = replace(MACHINE, pod_gpus=POD, oversubscription=3.0)


def groups_of(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """All groups of ranks that differ only along these axes, in the order of ranks."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(list)
    sizes = [layout.size(axis) for axis in layout.order]
    for place in product(*(range(size) for size in sizes)):
        rank = sum(index * prod(sizes[:level]) for level, index in enumerate(place))
        found[
            tuple(
                index for index, axis in zip(place, layout.order, strict=True) if axis not in axes
            )
        ].append(rank)
    return [sorted(ranks) for ranks in found.values()]


def rate_of_a_flow(flows: list[tuple[int, int]]) -> float:
    """Bytes a second of each flow (source, target) if all are equally fast and no port and no pod
    sends more than it can."""
    crossing = [(source, target) for source, target in flows if source // GPUS != target // GPUS]
    ports = Counter(source for source, _ in crossing)
    pods = Counter(source // POD for source, target in crossing if source // POD != target // POD)
    limits = [PORT / number for number in ports.values()] + [
        POD * PORT / PODS.oversubscription / number for number in pods.values()
    ]
    return min(limits)


def ring_flows(ranks: list[int]) -> Iterator[tuple[int, int]]:
    """A ring for each rank of a node: over the nodes in order, from and to the port with this place
    in the node."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[rank // GPUS].append(rank)
    for members, following in zip(
        nodes.values(), [*list(nodes.values())[1:], next(iter(nodes.values()))], strict=True
    ):
        yield from zip(members, following, strict=True)


ORDER = ("tp", "cp", "dp", "pp")
LAYOUTS = [
    (Layout(dp=64), ("dp",)),
    (Layout(tp=4, dp=16), ("dp",)),
    (Layout(tp=2, dp=32), ("dp",)),
    (Layout(tp=4, pp=4, dp=4), ("dp",)),
    (Layout(tp=4, pp=2, dp=8), ("dp",)),
    (Layout(tp=4, pp=4, dp=4, order=ORDER), ("dp",)),
    (Layout(tp=2, cp=4, dp=8), ("dp", "cp")),
    (Layout(tp=2, cp=8, dp=4), ("cp",)),
    (Layout(tp=8, dp=8), ("tp",)),
    (Layout(tp=32, dp=2), ("tp",)),
]


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS, ids=str)
def test_rings_share_what_leaves_a_pod(layout: Layout, axes: tuple[str, ...]) -> None:
    flows = [flow for ranks in groups_of(layout, axes) for flow in ring_flows(ranks)]
    ranks = PODS.group(layout, axes)
    assert ring_rate(PODS, ranks) == pytest.approx(ranks.local * rate_of_a_flow(flows))
    one = MACHINE.group(layout, axes)
    assert (one.size, one.local) == (ranks.size, ranks.local) and ring_rate(
        MACHINE, one
    ) == ranks.local * PORT


@pytest.mark.parametrize("experts", [8, 16, 32, 64])
def test_tokens_to_other_pods_share_what_leaves_a_pod(experts: int) -> None:
    """Each rank sends one part to each rank of its group: as many bytes to each, one flow for
    each."""
    flows = [
        flow
        for first in range(0, 64, experts)
        for flow in product(range(first, first + experts), repeat=2)
    ]
    size = 5e9
    ranks, _ = PODS.expert_groups(Layout(dp=64, ep=experts), 64)
    assert all_to_all(PODS, ranks, size) == pytest.approx(size / experts / rate_of_a_flow(flows))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=32, order=ORDER),
        Layout(pp=4, dp=16, order=ORDER),
        Layout(tp=4, pp=16),
        Layout(tp=2, pp=8, dp=4, order=ORDER),
    ],
    ids=str,
)
def test_messages_of_stages_share_what_leaves_a_pod(layout: Layout) -> None:
    """The stage that has a boundary of pods behind it sends, all of its ranks at once."""
    stages = sorted(groups_of(layout, tuple(axis for axis in ORDER if axis != "pp")))
    messages = [list(zip(stage, following, strict=True)) for stage, following in pairwise(stages)]
    rates = [
        rate_of_a_flow(flows) for flows in messages if flows[0][0] // GPUS != flows[0][1] // GPUS
    ]
    assert send(PODS, layout, 1e9) == pytest.approx(1e9 / min(rates))


def test_a_pod_that_has_all_nodes_changes_nothing() -> None:
    whole = replace(MACHINE, pod_gpus=64, oversubscription=7.0)
    for layout, axes in LAYOUTS:
        assert gather(whole, whole.group(layout, axes), 1e9) == gather(
            MACHINE, MACHINE.group(layout, axes), 1e9
        )


CLUSTER = ClusterConfig(
    nodes=64,
    gpus_per_node=8,
    memory=8e10,
    memory_bandwidth=3e12,
    peak_flops=PeakFlops(bf16=1e15),
    intra_node=Link(4.5e11),
    inter_node=Link(5e10),
    pod_nodes=16,
    pod_oversubscription=2.0,
)


def test_a_cluster_states_its_pods() -> None:
    machine = machine_of(CLUSTER)
    assert machine is not None and (machine.pod_gpus, machine.oversubscription) == (128, 2.0)
    joined = machine_of(replace(CLUSTER, nvlink_gpus=256))  # NVLink joins more than a pod
    assert joined is not None and joined.pod_gpus == joined.gpus_per_node == 256
    small = machine_of(replace(CLUSTER, nodes=16))
    assert small is not None and small.pod_gpus == 0


def test_half_of_the_description_of_pods_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cluster\.pod_oversubscription is missing\. Set both"):
        replace(CLUSTER, pod_oversubscription=None).check()
    with pytest.raises(ConfigError, match=r"^cluster\.pod_nodes is missing\. Set both"):
        replace(CLUSTER, pod_nodes=None).check()
    with pytest.raises(ConfigError, match=r"cluster\.pod_oversubscription must be .*1"):
        replace(CLUSTER, pod_oversubscription=0.5).check()
    CLUSTER.check()
