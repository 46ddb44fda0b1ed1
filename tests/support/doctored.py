"""Facts of ranks as the checks of `lightning-3d doctor` gather them, without ranks; and checks with
one changed measurement, with ranks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_3d.app.config.cluster import ClusterConfig, Link, PeakFlops
from lightning_3d.app.doctor.check import Check, GatheredAnswers, Setup
from lightning_3d.app.doctor.findings import DoctorFinding, RankPlace, RankPlaces
from lightning_3d.layout.layout import Layout

H100 = ClusterConfig(
    name="h100",
    nodes=2,
    gpus_per_node=2,
    accelerator="gpu",
    gpu="NVIDIA H100 SXM",
    memory=80e9,
    memory_bandwidth=3.35e12,
    nvlink_gpus=2,
    peak_flops=PeakFlops(bf16=989e12),
    intra_node=Link(450e9, 0.6e-6),
    inter_node=Link(50e9, 2.7e-6),
)
SMI = Path(__file__).parents[2] / "tools" / "cuda_sim" / "bin"


def setup_of(
    layout: str = "dp4", accelerator: str = "gpu", folder: str = "/runs", **more: Any
) -> Setup:
    cluster = H100 if accelerator == "gpu" else ClusterConfig(name="local_cpu", accelerator="cpu")
    return Setup(
        Layout.parse(layout),
        accelerator,
        more.pop("cluster", cluster),
        folder,
        more.pop("limit", 20.0),
    )


def gathered(
    facts: Mapping[int, Mapping[str, Any]],
    setup: Setup | None = None,
    per_host: int = 2,
    earlier: Mapping[str, Any] | None = None,
) -> GatheredAnswers:
    """Facts of ranks that fill hosts node0, node1, ... in order."""
    places = RankPlaces(
        [RankPlace(rank, f"node{rank // per_host}", rank % per_host) for rank in facts],
        max(facts) + 1,
        per_host,
    )
    return GatheredAnswers(
        setup or setup_of(), places, {rank: dict(one) for rank, one in facts.items()}, earlier or {}
    )


def all_ranks(count: int = 4, **facts: Any) -> dict[int, dict[str, Any]]:
    """The same facts on all ranks; the caller changes some."""
    return {rank: dict(facts) for rank in range(count)}


def named(findings: Sequence[DoctorFinding], name: str) -> DoctorFinding:
    """The finding of this name."""
    found = [finding for finding in findings if finding.name == name]
    assert found, f"there is no {name!r} among {[finding.name for finding in findings]}"
    return found[0]


def with_measure(check: Check, measure: Callable[..., Any]) -> Check:
    return replace(check, measure=measure)
