"""Findings from given facts: links, host, variables, file system, compute and collectives."""

from pathlib import Path
from typing import Any

import pytest
from doctored import all_ranks, gathered, named, setup_of

from lightning_3d.app.doctor import compute, environment, file_system, host, links, links_rate
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG

FAST = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
REAL = {"GPUs": all_ranks(row={"name": "NVIDIA H100 80GB HBM3"})}


def wired(kind: str = "NV18", **more: Any) -> dict[int, dict[str, Any]]:
    """Two hosts with two GPUs and an InfiniBand port each."""
    topology = {"GPU0": {"GPU0": "X", "GPU1": kind}, "GPU1": {"GPU0": kind, "GPU1": "X"}}
    shared = {
        "net": {"eth0": {"state": "up", "speed": "10000"}},
        "infiniband": {"mlx5_0:1": FAST},
        "topology": topology,
    }
    return {rank: {"gpu": str(rank % 2), **shared, **more} for rank in range(4)}


def test_links_of_good_hosts_are_ok_and_named_by_axis() -> None:
    found = links.judge(gathered(wired(), setup_of("tp2_dp2")))
    assert {finding.verdict for finding in found} == {OK}
    assert named(found, "tp uses").measured == "NV18 (within a host)"
    assert named(found, "dp uses").measured == "the network (between hosts)"
    assert "1 x 400 Gb/sec (4X NDR)" in named(found, "InfiniBand").measured


def test_no_nvlink_where_the_cluster_has_it_is_wrong() -> None:
    finding = named(links.judge(gathered(wired("PHB"))), "between GPUs")
    assert finding.verdict == WRONG and "no NVLink, but PHB on node0" in finding.measured


def test_a_port_that_is_down_or_missing_is_named() -> None:
    facts = wired()
    facts[2] = {**facts[2], "infiniband": {"mlx5_0:1": {**FAST, "state": "1: DOWN"}}}
    finding = named(links.judge(gathered(facts)), "InfiniBand")
    assert (finding.verdict, finding.ranks) == (
        WARNING,
        (2, 3),
    ) and "mlx5_0:1 not active on node1" in finding.measured
    facts[2] = {**facts[2], "infiniband": {}}
    finding = named(links.judge(gathered(facts)), "InfiniBand")
    assert finding.verdict == WRONG and "no port on rank 2 (node1)" in finding.measured


def test_a_slow_network_and_tensor_parallel_groups_across_hosts_are_warned_of() -> None:
    found = links.judge(gathered(wired(infiniband={}), setup_of("tp4")))
    assert (
        named(found, "network").verdict == WARNING
        and "eth0 up 10 Gb/s, no InfiniBand" in named(found, "network").measured
    )
    assert named(found, "tp uses").verdict == WARNING


def test_interfaces_and_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    for name, values in {
        "eth0": {"operstate": "up", "speed": "25000"},
        "lo": {},
        "docker0": {},
        "ib0": {"operstate": "down"},
    }.items():
        (tmp_path / "net" / name).mkdir(parents=True)
        for key, value in values.items():
            (tmp_path / "net" / name / key).write_text(f"{value}\n")
    port = tmp_path / "ib" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    assert links.interfaces(tmp_path / "net") == {
        "eth0": {"state": "up", "speed": "25000"},
        "ib0": {"state": "down", "speed": None},
    }
    assert links.ports(tmp_path / "ib") == {
        "mlx5_0:1": {"state": "4: ACTIVE", "rate": None, "link_layer": None}
    }
    assert links.interfaces(tmp_path / "none") == links.ports(tmp_path / "none") == {}


def hosts(**more: Any) -> dict[int, dict[str, Any]]:
    limits = {"files": 65536, "locked": None, "stack": 8 << 20}
    facts = {
        "limits": limits,
        "shm": {"total": 1 << 34, "free": 1 << 34},
        "clock": None,
        "ports": {"29500": True},
        "reached": {},
    }
    found: dict[int, dict[str, Any]] = {rank: {**facts, **more} for rank in range(4)}
    found[2]["clock"] = {"offset": 0.001, "error": 0.0005}
    return found


def test_a_good_host_is_ok() -> None:
    found = host.judge(gathered(hosts()))
    assert {finding.verdict for finding in found} == {OK}
    assert named(found, "clocks").measured == "at most 1 ms from that of rank 0"


@pytest.mark.parametrize(
    ("name", "key", "value", "verdict", "said"),
    [
        (
            "open files",
            "limits",
            {"files": 256, "locked": None, "stack": None},
            WRONG,
            "256 on rank 2 (node1)",
        ),
        (
            "open files",
            "limits",
            {"files": 2048, "locked": None, "stack": None},
            WARNING,
            "2048 on rank 2 (node1)",
        ),
        (
            "locked memory",
            "limits",
            {"files": 65536, "locked": 65536, "stack": None},
            WARNING,
            "64.0 KiB on rank 2 (node1)",
        ),
        (
            "stack",
            "limits",
            {"files": 65536, "locked": None, "stack": 1 << 20},
            WARNING,
            "1.00 MiB on rank 2 (node1)",
        ),
        (
            "/dev/shm",
            "shm",
            {"total": 64 << 20, "free": 64 << 20},
            WRONG,
            "64.0 MiB free on rank 2 (node1)",
        ),
        (
            "/dev/shm",
            "shm",
            {"total": 512 << 20, "free": 512 << 20},
            WARNING,
            "512 MiB free on rank 2 (node1)",
        ),
        ("ports", "ports", {"29400": True, "29500": False}, WARNING, "29500 in use on node1"),
        (
            "connections",
            "reached",
            {"0": "10.0.0.1:4711: timed out"},
            WRONG,
            "node1 cannot connect to node0: 10.0.0.1:4711: timed out",
        ),
        (
            "clocks",
            "clock",
            {"offset": -3.0, "error": 0.001},
            WARNING,
            "-3 s from that of rank 0 on rank 2 (node1)",
        ),
        ("clocks", "clock", {"offset": 400.0, "error": 0.001}, WRONG, "+400 s from that of rank 0"),
        ("clocks", "clock", None, UNKNOWN, "not measured on rank 2 (node1)"),
    ],
)
def test_a_bad_host_is_named(name: str, key: str, value: Any, verdict: str, said: str) -> None:
    facts = hosts()
    facts[2][key] = value
    finding = named(host.judge(gathered(facts)), name)
    assert finding.verdict == verdict and said in finding.measured, finding


def test_limits_of_this_process_are_read(tmp_path: Path) -> None:
    assert set(host.limits()) == {"files", "locked", "stack"}
    assert (host.shared_memory(str(tmp_path)) or {})["total"] > 0 and host.shared_memory(
        "/nowhere"
    ) is None
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        assert not host.can_bind(taken.getsockname()[1])


def variables(**of_rank_1: str) -> dict[int, dict[str, Any]]:
    facts: dict[int, dict[str, Any]] = {
        rank: {"variables": {"NCCL_IB_HCA": "mlx5"}, "cores": 8, "threads": 2} for rank in range(4)
    }
    facts[1]["variables"] = {"NCCL_IB_HCA": "mlx5", **of_rank_1}
    return facts


@pytest.mark.parametrize(
    ("variable", "value", "verdict"),
    [
        ("NCCL_P2P_DISABLE", "1", WRONG),
        ("NCCL_SHM_DISABLE", "1", WRONG),
        ("NCCL_IB_DISABLE", "1", WRONG),
        ("NCCL_DEBUG", "TRACE", WARNING),
        ("NCCL_LAUNCH_MODE", "GROUP", WARNING),
        ("NCCL_ALGO", "Ring", WARNING),
        ("NCCL_PROTO", "LL128", WARNING),
        ("CUDA_LAUNCH_BLOCKING", "1", WRONG),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", WARNING),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", WRONG),
    ],
)
def test_harmful_variables_are_named(variable: str, value: str, verdict: str) -> None:
    finding = named(environment.judge(gathered(variables(**{variable: value}))), variable)
    assert (finding.verdict, finding.ranks) == (
        verdict,
        (1,),
    ) and f"{value} on rank 1 (node0)" in finding.measured
    off = environment.judge(gathered(variables(NCCL_P2P_DISABLE="0")))
    assert named(off, "NCCL_P2P_DISABLE").measured == "unset, but 0 on rank 1 (node0)", (
        "it only differs"
    )


def test_variables_that_differ_are_named_unless_they_may() -> None:
    finding = named(environment.judge(gathered(variables(NCCL_IB_HCA="mlx4"))), "NCCL_IB_HCA")
    assert (finding.verdict, finding.ranks) == (
        WRONG,
        (1,),
    ) and "mlx4 on rank 1" in finding.measured
    assert (
        named(environment.judge(gathered(variables(CUDA_VISIBLE_DEVICES="3"))), "variables").verdict
        == OK
    )
    assert environment.watched({"NCCL_DEBUG": "INFO", "HOME": "/root", "MASTER_PORT": "1"}) == {
        "NCCL_DEBUG": "INFO"
    }


def test_too_many_threads_are_warned_of() -> None:
    facts = variables()
    facts[2]["threads"] = facts[3]["threads"] = 64
    finding = named(environment.judge(gathered(facts)), "OMP_NUM_THREADS")
    assert (
        finding.ranks == (2, 3)
        and "2 ranks with 128 threads on 8 cores of node1" in finding.measured
    )


def files(**of_rank_2: Any) -> dict[int, dict[str, Any]]:
    speed = {"write": 1e9, "read": 2e9, "free": 10**12}
    facts: dict[int, dict[str, Any]] = {0: {"locked": True, "renames": 50, **speed}}
    facts |= {
        rank: {"seen": True, "seconds": 0.1, "held": True, "torn": "", **speed}
        for rank in (1, 2, 3)
    }
    facts[2] |= of_rank_2
    return facts


@pytest.mark.parametrize(
    ("name", "fact", "verdict", "said"),
    [
        (
            "shared folder",
            {"seen": False},
            WRONG,
            "rank 2 (node1) cannot see what rank 0 writes in /runs",
        ),
        ("shared folder", {"seconds": 7.0}, WARNING, "within 7 s (rank 2 (node1))"),
        ("locks", {"held": False}, WARNING, "rank 2 (node1) cannot see that rank 0 holds a lock"),
        ("locks", {"held": None}, WARNING, "has no locks"),
        (
            "renames",
            {"torn": "Stale file handle"},
            WARNING,
            "rank 2 (node1) read a file that rank 0 replaced: Stale file handle",
        ),
        (
            "write",
            {"write_error": "Disk quota exceeded"},
            WRONG,
            "node1 cannot write: Disk quota exceeded",
        ),
        ("write speed", {"write": 1e6}, WARNING, "1.00 MB/s on the slowest host"),
        ("free space", {"free": 10**9}, WARNING, "1.00 GB"),
    ],
)
def test_a_bad_file_system_is_named(
    name: str, fact: dict[str, Any], verdict: str, said: str
) -> None:
    good = file_system.judge(gathered(files()))
    assert {finding.verdict for finding in good} == {OK}
    finding = named(file_system.judge(gathered(files(**fact))), name)
    assert finding.verdict == verdict and said in finding.measured, finding


def test_a_folder_that_rank_0_cannot_write_is_wrong() -> None:
    found = file_system.judge(
        gathered(
            {
                0: {"error": "Permission denied: /runs", "seen": False},
                1: {"seen": False, "seconds": 1.0},
            }
        )
    )
    assert [(one.verdict, one.name) for one in found] == [(WRONG, "folder")]


def test_a_slow_gpu_is_wrong_and_a_slow_cpu_rank_is_warned_of() -> None:
    rates = {0: 700e12, 1: 700e12, 2: 700e12, 3: 420e12}
    facts = {rank: {"rate": rate, "row": None} for rank, rate in rates.items()}
    found = compute.judge(gathered(facts, earlier=REAL))
    assert named(found, "slow rank").verdict == WRONG
    assert (
        named(found, "slow rank").measured
        == "rank 3 (node1) reaches 420 TFLOP/s, 60% of the median"
    )
    assert named(found, "datasheet").verdict == OK
    facts[3]["rate"] = 580e12
    assert named(compute.judge(gathered(facts, earlier=REAL)), "slow rank").verdict == WARNING
    cpu = compute.judge(
        gathered({0: {"rate": 4e9}, 1: {"rate": 4e9}, 2: {"rate": 1e9}}, setup_of("dp3", "cpu"))
    )
    assert named(cpu, "slow rank").verdict == WARNING
    slow = {rank: {"rate": 200e12} for rank in range(4)}
    assert named(compute.judge(gathered(slow, earlier=REAL)), "datasheet").verdict == WRONG


def sent(rate_of: Any, latency: float = 20e-6) -> dict[int, dict[str, Any]]:
    """dp4 over two hosts: an all-gather and pairs, at given bytes a second."""
    size = 1 << 27
    facts = {}
    for rank in range(4):
        entry = {"axis": "dp", "name": "all_gather", "group": [0, 1, 2, 3]}
        entries = [
            {**entry, "bytes": 4096, "seconds": latency},
            {**entry, "bytes": size, "seconds": 0.75 * size / rate_of("dp")},
        ]
        pair = (rank, (rank + 1) % 4)
        pairs = [
            {"axis": "dp", "ranks": list(pair), "bytes": size, "seconds": size / rate_of(pair)}
        ]
        facts[rank] = {"collectives": entries, "pairs": pairs}
    return facts


def test_collectives_are_compared_with_the_datasheet() -> None:
    good = links_rate.judge(gathered(sent(lambda one: 80e9), earlier=REAL))
    assert {finding.verdict for finding in good} == {OK}
    assert "80.0 GB/s, 20 us for 4096 B; 1 group of 4" in named(good, "dp all-gather").measured
    bad = named(links_rate.judge(gathered(sent(lambda one: 2e9), earlier=REAL)), "dp all-gather")
    assert (
        bad.verdict == WRONG
        and "2% of 93.0 GB/s" in bad.measured
        and "NVIDIA H100 SXM" in bad.measured
    )
    unknown = setup_of(cluster=setup_of("dp4", "cpu").cluster)
    assert (
        named(
            links_rate.judge(gathered(sent(lambda one: 2e9), unknown, earlier=REAL)),
            "dp all-gather",
        ).verdict
        == UNKNOWN
    )


def test_late_small_messages_are_warned_of() -> None:
    found = links_rate.judge(gathered(sent(lambda one: 80e9, latency=0.004), earlier=REAL))
    assert (
        "4 ms for a small message on all ranks" in named(found, "dp all-gather, latency").measured
    )


def test_the_rank_that_all_slow_pairs_share_is_named() -> None:
    facts = sent(lambda one: 10e9 if one != "dp" and 3 in one else 80e9)
    found = links_rate.judge(gathered(facts, setup_of("dp4"), per_host=4, earlier=REAL))
    finding = named(found, "pairs within a host")
    assert (finding.verdict, finding.ranks) == (
        WRONG,
        (3,),
    ) and "all slow pairs have rank 3 (node0)" in finding.measured


def test_a_slow_group_is_named() -> None:
    facts = {}
    for rank in range(6):
        group = [rank // 2 * 2, rank // 2 * 2 + 1]
        entry = {"axis": "tp", "name": "all_reduce", "group": group}
        slow = 3.0 if rank > 3 else 1.0
        entries = [
            {**entry, "bytes": 4096, "seconds": 2e-5},
            {**entry, "bytes": 1 << 27, "seconds": slow * (1 << 27) / 300e9},
        ]
        facts[rank] = {"collectives": entries, "pairs": []}
    finding = named(
        links_rate.judge(gathered(facts, setup_of("tp2_dp3"), earlier=REAL)),
        "tp all-reduce, slow group",
    )
    assert (finding.verdict, finding.ranks) == (
        WRONG,
        (4, 5),
    ) and "ranks 4-5 (node2): 100 GB/s, 33% of the median" in finding.measured
