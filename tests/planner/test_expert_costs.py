"""What the planner expects of experts on several nodes, and of a shared expert that runs while tokens travel."""

from dataclasses import replace
from itertools import combinations

import pytest

from lightning_3d.layout import Layout
from lightning_3d.planner.architecture import Architecture
from lightning_3d.planner.block_costs import Part, nodes_of_a_token, work_of
from lightning_3d.planner.job import Job
from lightning_3d.planner.machine import Efficiency, Machine

MODEL = Architecture.plain(
    layers=2, hidden=1024, heads=8, kv_heads=8, vocab=1000, ffn=512, gated=True, tied=False, experts=16, top_k=4
)
MACHINE = Machine("H100", 4, 4, 80e9, 3.35e12, 989e12, 1979e12, 67e12, 450e9, 25e9, 0.0, 0.0, Efficiency(0.6, 0.4))


def block(model: Architecture, layout: str, machine: Machine = MACHINE) -> Part:
    [found] = work_of(Job(model, Layout.parse(layout), 4096, 64, 1), machine).blocks
    return found


@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
def test_nodes_of_a_token(nodes: int) -> None:
    """Against all choices of experts."""
    chosen = [len({expert // (16 // nodes) for expert in experts}) for experts in combinations(range(16), 4)]
    assert nodes_of_a_token(MODEL, nodes) == pytest.approx(sum(chosen) / len(chosen))


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "chosen"), [(8, 2), (4, 2), (4, 3)])
def test_nodes_of_a_token_that_chooses_groups(groups: int, chosen: int, nodes: int) -> None:
    """Against all choices of groups, and of experts in them (DeepSeek-V3)."""
    size = 16 // groups
    found = [
        len({expert // (16 // nodes) for expert in experts})
        for picked in combinations(range(groups), chosen)
        for experts in combinations([group * size + place for group in picked for place in range(size)], 4)
    ]
    model = replace(MODEL, groups=groups, top_groups=chosen)
    assert nodes_of_a_token(model, nodes) == pytest.approx(sum(found) / len(found))


def test_a_token_crosses_once_to_each_node() -> None:
    """Both ways, forward and backward, and within the node once to each expert."""
    found = block(MODEL, "ep16_dp16")
    row, tokens = 1024 * 2, 4096
    crossing = tokens * nodes_of_a_token(MODEL, 4) * 3 / 4 * row / (25e9 * 0.93)
    inside = tokens * 4 * 3 / 4 * row / (450e9 * 0.8)
    assert found.forward_communication == pytest.approx(2 * (crossing + inside))
    assert found.backward_communication == pytest.approx(found.forward_communication)


def test_one_way_there_is_hidden_behind_the_shared_expert() -> None:
    """As much of it as the shared expert takes; within a node it takes longer than the exchange."""
    for layout, whole in (("ep16_dp16", False), ("ep4_dp16", True)):
        alone, beside = block(MODEL, layout), block(replace(MODEL, shared_ffn=64 if not whole else 4096), layout)
        hidden = alone.forward_communication - beside.forward_communication
        if whole:
            assert hidden == pytest.approx(alone.forward_communication / 2)
        else:
            assert hidden == pytest.approx(beside.forward - alone.forward) and hidden < alone.forward_communication / 2
