"""`lightning-3d doctor` on the command line, and a plan that reads what it measured."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from command_line import Result, assert_refused, run_commands
from doctored import H100

from lightning_3d.app.cli.doctor import COMMAND
from lightning_3d.app.planner.advice import machine_of
from lightning_3d.app.planner.profile_file import LINKS_FORMAT, read_profile
from lightning_3d.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def good(folder: Path) -> Result:
    line = [
        "doctor",
        "cluster=local_cpu",
        "parallelism=tp2",
        "--folder",
        str(folder),
        "--json",
        str(folder / "doctor.json"),
    ]
    return run_commands([line], timeout=120, warm=True)[0]


def test_a_machine_is_checked(good: Result, folder: Path) -> None:
    assert good.code == 0 and good.left == [], good.output
    assert (
        "2 CPU ranks on 1 host" in good.output and ", layout tp2, cluster local_cpu" in good.output
    )
    assert "tp all-reduce" in good.output and " 0 unknown" in good.output
    content = json.loads((folder / "doctor.json").read_text())
    assert (content["format"], content["device"], content["exit_code"]) == (LINKS_FORMAT, "cpu", 0)
    assert set(content["facts"]["versions"]) == {"0", "1"} and [
        place["rank"] for place in content["places"]
    ] == [0, 1]
    assert [path.name for path in folder.iterdir()] == ["doctor.json"]


def test_help_explains_exit_codes() -> None:
    text = COMMAND.help()
    assert (
        "torchrun" in text and "Exit code: 1 if something is wrong" in text and "--limit N" in text
    )


@pytest.mark.slow
def test_refusals(tmp_path: Path) -> None:
    lines = {
        "tp2_pq2": ["doctor", "parallelism=tp2_pq2"],
        "size": ["doctor", "cluster=local_cpu", "--ranks", "2", "parallelism=tp4"],
        "GPUs": ["doctor", "cluster=h100"],
        "option": ["doctor", "--rank", "2"],
        "folder": ["doctor", "--json", "/nowhere/doctor.json"],
        "limit": ["doctor", "--limit", "0"],
    }
    found = dict(zip(lines, run_commands(list(lines.values())), strict=True))
    assert_refused(found["tp2_pq2"], ['unknown axis "pq"'])
    assert_refused(
        found["size"],
        ["Layout tp4 has 4 ranks, but 2 are asked for.", "tp2, dp2 or pp2", "--ranks 4"],
    )
    assert_refused(
        found["GPUs"], ["so 2 ranks on this machine need 2 GPUs, but it has 0", "cluster=local_cpu"]
    )
    assert_refused(found["option"], ['Did you mean "--ranks"?'])
    assert_refused(found["folder"], ["there is no folder /nowhere"])
    assert_refused(found["limit"], ["--limit must be a whole number of at least 1"])


def measured(path: Path, **more: object) -> Path:
    """A file of doctor whose links have 200e9 bytes/s and 5 us in a node, 20e9 and 10 us between
    nodes."""
    operations = []
    for placement, ranks, latency, rate in (
        ("node", 2, 5e-6, 200e9),
        ("between", 2, 10e-6, 20e9),
        ("mixed", 4, 1.0, 1.0),
    ):
        for size in (4096, 1 << 27):
            seconds = (ranks - 1) * latency + (ranks - 1) / ranks * size / rate
            one = {"kind": "collective", "name": "all_gather", "placement": placement}
            operations.append({**one, "ranks": ranks, "bytes": size, "seconds": seconds})
    about = {
        "format": LINKS_FORMAT,
        "device": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "ranks": 4,
        "ranks_per_node": 2,
    }
    path.write_text(json.dumps(about | {"operations": operations} | more))
    return path


def test_the_planner_uses_measured_links(tmp_path: Path) -> None:
    stated, machine = machine_of(H100), machine_of(H100, str(measured(tmp_path / "links.json")))
    assert stated and machine
    assert machine.link * machine.efficiency.link == pytest.approx(200e9, rel=1e-3)
    assert machine.network * machine.efficiency.network == pytest.approx(20e9, rel=1e-3)
    assert (machine.link_latency, machine.network_latency) == pytest.approx((5e-6, 10e-6), rel=1e-2)
    assert asdict(stated.efficiency)["matmul"] == machine.efficiency.matmul, (
        "everything else is the datasheet's"
    )


def test_the_planner_refuses_links_that_say_nothing(
    tmp_path: Path, good: Result, folder: Path
) -> None:
    with pytest.raises(ConfigError, match="was measured on simulated GPUs"):
        read_profile(measured(tmp_path / "simulated.json", simulated=True))
    with pytest.raises(ConfigError, match="has no measurement of a link"):
        read_profile(measured(tmp_path / "none.json", operations=[]))
    with pytest.raises(ConfigError, match="damaged: KeyError: 'placement'"):
        read_profile(measured(tmp_path / "damaged.json", operations=[{"kind": "collective"}]))
    with pytest.raises(ConfigError, match="has measurements of links only"):
        machine_of(
            type(H100)(name="local", nodes=1, accelerator="auto"), str(folder / "doctor.json")
        )
