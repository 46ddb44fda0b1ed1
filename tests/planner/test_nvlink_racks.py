"""Racks in which fast links connect the GPUs of many nodes: the planner plans for all GPUs of a
cluster, whatever its size."""

from dataclasses import replace

import pytest

from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.planner.advice import machine_of


@pytest.mark.parametrize(
    ("trays", "racks", "gpus_of_a_rack"),
    [
        (1, 1, 4),
        (2, 1, 8),
        (16, 1, 64),
        (18, 1, 72),
        (24, 2, 48),
        (32, 2, 64),
        (36, 2, 72),
        (64, 4, 64),
        (90, 5, 72),
        (256, 16, 64),
    ],
)
def test_racks_have_equally_many_trays(trays: int, racks: int, gpus_of_a_rack: int) -> None:
    """72 GPUs fit in a rack of 18 trays with 4 GPUs each."""
    cluster = check_keys(
        compose(["model=llama3_1_8b", f"cluster=gb200_{trays}x4", "trainer.dry=true"])
    ).cluster
    machine = machine_of(cluster)
    assert machine is not None
    assert (machine.nodes, machine.gpus_per_node) == (racks, gpus_of_a_rack)
    assert machine.gpus == 4 * trays


def test_every_number_of_nodes_is_planned_for_whole() -> None:
    cluster = check_keys(
        compose(["model=llama3_1_8b", "cluster=gb200", "trainer.dry=true"])
    ).cluster
    for nodes in range(1, 300):
        machine = machine_of(replace(cluster, nodes=nodes))
        assert machine is not None
        assert machine.gpus == 4 * nodes and machine.gpus_per_node <= 72
