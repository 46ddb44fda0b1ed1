"""`lightning-3d plan --scaling N`: the fastest layouts on fewer and on more nodes."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import run_commands

from lightning_3d.app.config.compose import compose
from lightning_3d.app.config.plan_run import check_keys
from lightning_3d.app.config.run_config import CompleteRun, complete_run
from lightning_3d.app.planner.scaling import (
    Series,
    efficiencies,
    node_counts,
    scaling,
    scaling_data,
    scaling_tables,
)
from lightning_3d.app.planner.scaling_figure import scaling_card
from lightning_3d.app.planner.tables import tokens_per_second
from lightning_3d.errors import ConfigError

SMALL = [
    "model=llama3_1_8b",
    "cluster=h100_2x8",
    "data.global_batch_size=64",
    "data.sequence_length=4096",
]


def run_of(*overrides: str) -> CompleteRun:
    return complete_run(check_keys(compose([*SMALL, *overrides, "trainer.dry=true"])))


@pytest.fixture(scope="module")
def series() -> Series:
    return scaling(run_of(), "bf16", 64)


@pytest.mark.parametrize(
    ("nodes", "most", "counts"),
    [
        (4, 64, [1, 2, 4, 8]),
        (3, 16, [1, 2, 3]),
        (1, 8, [1]),
        (1, 15, [1]),
        (16, 8, [1, 16]),
        (1, 1024, [1, 2, 4, 8, 16, 32, 64, 128]),
    ],
)
def test_sizes_are_powers_of_two_and_the_clusters_own(
    nodes: int, most: int, counts: list[int]
) -> None:
    assert node_counts(nodes, 8, most) == counts


@pytest.mark.parametrize("most", [1, 7, 65_537])
def test_a_size_that_no_node_or_no_cluster_has_is_refused(most: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"--scaling must be at least the 8 GPUs of a node .* got {most}\."
    ):
        node_counts(1, 8, most)


def test_batches_are_fixed_or_in_proportion(series: Series) -> None:
    assert [(point.gpus, point.global_batch) for point in series["fixed"]] == [
        (8, 64),
        (16, 64),
        (32, 64),
        (64, 64),
    ]
    assert [(point.gpus, point.global_batch) for point in series["proportional"]] == [
        (8, 32),
        (16, 64),
        (32, 128),
        (64, 256),
    ]
    assert series["fixed"][1] is series["proportional"][1], (
        "the cluster's own size was searched twice"
    )


def test_a_batch_that_is_no_whole_number_is_left_out() -> None:
    odd = scaling(run_of("data.global_batch_size=63", "cluster.nodes=4"), "bf16", 32)
    assert [point.gpus for point in odd["proportional"]] == [32]
    assert [point.gpus for point in odd["fixed"]] == [8, 16, 32]


def test_efficiency_is_the_speed_of_a_gpu_over_that_on_the_fewest(series: Series) -> None:
    for points in series.values():
        speeds = [
            tokens_per_second(point.best) / point.gpus for point in points if point.best is not None
        ]
        assert efficiencies(points) == pytest.approx(
            [speed / speeds[0] for speed in speeds], rel=1e-12
        )


@pytest.mark.slow
def test_a_slow_network_costs_efficiency() -> None:
    """The same gradients are sent in a step that computes less: 2 sequences for each GPU of 4 nodes
    instead of 8."""
    slow = scaling(run_of("cluster.inter_node.bandwidth=1e9"), "bf16", 32)
    fixed, proportional = (efficiencies(slow[name])[-1] for name in ("fixed", "proportional"))
    assert fixed is not None and proportional is not None
    assert fixed < proportional < 0.9


@pytest.mark.slow
def test_networks_that_cost_nothing_scale_perfectly() -> None:
    """Ranks with a batch each, whose messages take no time, are as fast as one node."""
    free = [
        "cluster.inter_node.bandwidth=1e18",
        "cluster.inter_node.latency=0",
        "cluster.intra_node.bandwidth=1e18",
    ]
    run = run_of(
        *free,
        "cluster.intra_node.latency=0",
        "parallelism=auto",
        "parallelism.zero_stage=0",
        "cluster.memory=1e15",
    )
    points = scaling(run, "bf16", 64)["proportional"]
    assert efficiencies(points) == pytest.approx([1.0] * 4, rel=1e-3)


@pytest.mark.slow
def test_sizes_on_which_nothing_fits_have_no_numbers() -> None:
    large = ["model=llama3_70b", "cluster=h100_8x8", "data.global_batch_size=64"]
    series = scaling(run_of(*large), "bf16", 64)
    assert efficiencies(series["fixed"])[0] is None
    assert next(value for value in efficiencies(series["fixed"]) if value is not None) == 1.0
    assert re.search(r"\| 8 +\| 64 +\| no layout fits +\| - ", scaling_tables(series))
    first = scaling_data(series)["fixed"][0]
    assert first == {
        "gpus": 8,
        "global_batch_size": 64,
        "layout": None,
        "seconds": None,
        "mfu": None,
        "efficiency": None,
    }
    nothing = {name: points[:1] for name, points in series.items()}
    assert "No layout fits." in scaling_card(nothing)


def test_the_figure_has_a_point_for_each_size(series: Series) -> None:
    drawn = ElementTree.fromstring(scaling_card(series))
    texts = [each.text for each in drawn.iter("text")]
    assert {"8", "16", "32", "64", "GPUs", "100%"} <= set(texts)
    titles = [each.text or "" for each in drawn.iter("title")]
    assert len(titles) == 8 and all("tokens/s" in title for title in titles)
    lines = [each.get("points", "").split() for each in drawn.iter("polyline")]
    assert [len(points) for points in lines] == [4, 4]
    for points in lines:
        places = [float(point.partition(",")[0]) for point in points]
        gaps = [right - left for left, right in zip(places, places[1:], strict=False)]
        assert gaps == pytest.approx([gaps[0]] * 3, abs=0.2), "each doubling is as far"


@pytest.mark.slow
def test_the_command_prints_and_writes_it(tmp_path: Path) -> None:
    (result,) = run_commands([["plan", "--scaling", "32", *SMALL, "--out", str(tmp_path)]])
    assert result.code == 0 and not result.torch
    assert "Scaling with the same global batch:" in result.output
    content = json.loads((tmp_path / "plan.json").read_text())
    assert [point["gpus"] for point in content["scaling"]["fixed"]] == [8, 16, 32]
    assert content["scaling"]["fixed"][1]["seconds"] == content["best"][0]["seconds"]
    assert "<h2>Scaling</h2>" in (tmp_path / "plan.html").read_text()
