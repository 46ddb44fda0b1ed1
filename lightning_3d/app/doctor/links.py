"""Check: links between the GPUs of a host, its network interfaces, and which axis of the layout
uses which of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lightning_3d.app.doctor import nvidia_smi
from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG, DoctorFinding, alike
from lightning_3d.errors import listed
from lightning_3d.layout.layout import AXES

_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_SLOW_MBITS = 25_000
"""Ethernet below 25 Gb/s: half of the slowest network in `conf/cluster` is 100 Gb/s for each
GPU."""
_VIRTUAL = re.compile(
    r"(lo|docker|veth|br-|virbr|ifb|dummy|tun|tap|bonding_masters|cni|flannel|cali|kube)"
)


def measure(room: Room) -> Facts:
    """Return the links of this host, on its lowest rank; elsewhere only the GPU's number."""
    facts: Facts = {"gpu": _gpu_number(room)}
    if room.is_leader:
        facts |= {"net": interfaces(), "infiniband": ports()}
        facts["topology"] = nvidia_smi.topology() if room.setup.accelerator == "gpu" else None
    return facts


def _gpu_number(room: Room) -> str | None:
    if room.setup.accelerator != "gpu":
        return None
    from lightning_3d.app.doctor.gpus import uuid_of

    row = nvidia_smi.own_row(
        nvidia_smi.gpus(("index", "uuid")) or [],
        room.local_rank,
        uuid_of(room.local_rank),
        os.environ,
    )
    return row["index"] if row else None


def interfaces(folder: Path = _NET) -> dict[str, dict[str, str | None]]:
    """Return state and speed (Mbit/s) of the network interfaces that are not virtual."""
    names = [path.name for path in folder.glob("*")] if folder.is_dir() else []
    real = sorted(name for name in names if not _VIRTUAL.match(name))
    return {
        name: {"state": _read(folder / name / "operstate"), "speed": _read(folder / name / "speed")}
        for name in real
    }


def ports(folder: Path = _INFINIBAND) -> dict[str, dict[str, str | None]]:
    """Return state and rate of the ports of InfiniBand and RoCE adapters."""
    found = sorted(folder.glob("*/ports/*")) if folder.is_dir() else []
    keys = ("state", "rate", "link_layer")
    return {
        f"{path.parts[-3]}:{path.name}": {key: _read(path / key) for key in keys} for path in found
    }


def _read(path: Path) -> str | None:
    """Read a file of the kernel; None where it has none, or refuses as for the speed of an
    interface that is down."""
    try:
        return path.read_text("utf-8").strip() or None
    except OSError:
        return None


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge links, ports and interfaces of each host, then name what each axis uses."""
    findings = [*_gpu_links(gathered), *_ports(gathered), *_interfaces(gathered)]
    return [*findings, *_axes(gathered)]


def _gpu_links(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Compare the links between the GPUs of each host, with each other and with the cluster."""
    if gathered.setup.accelerator != "gpu":
        return []
    places, findings = gathered.places, []
    kinds = {}
    for rank in gathered.of_hosts():
        ranks_here = places.hosts[places.host(rank)]
        kinds[rank] = {
            _link(gathered, first, second) for first in ranks_here for second in ranks_here
        } - {"X", None}
    if not any(kinds.values()):
        alone = all(len(ranks) == 1 for ranks in places.hosts.values())
        words = "one rank on each host" if alone else "nvidia-smi topo -m does not tell"
        return [DoctorFinding("between GPUs", OK if alone else UNKNOWN, words)]
    for rank, used in kinds.items():
        fast = {kind for kind in used if kind and kind.startswith("NV")}
        words = f"{listed(sorted(map(str, used)))} on {places.host(rank)}"
        ranks = tuple(places.hosts[places.host(rank)])
        if fast and used - fast:
            advice = (
                "Only some pairs have NVLink: keep a tensor-parallel group within those (nvidia-smi"
                " topo -m)."
            )
            findings.append(DoctorFinding("between GPUs", WARNING, words, ranks, advice))
        elif used and not fast and (gathered.setup.cluster.nvlink_gpus or 1) > 1:
            advice = (
                f"The cluster {gathered.setup.cluster.name} has NVLink: look at nvidia-smi nvlink"
                " --status and the fabric manager."
            )
            findings.append(
                DoctorFinding("between GPUs", WRONG, f"no NVLink, but {words}", ranks, advice)
            )
    if findings:
        return findings
    texts = {rank: listed(sorted(map(str, used))) for rank, used in kinds.items()}
    return [
        alike(
            "between GPUs", texts, places, verdict=WARNING, advice="Use hosts that are wired alike."
        )
    ]


def _ports(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Look for InfiniBand ports that are down, slower than others, or missing on a host."""
    hosts = gathered.of_hosts()
    places, findings = gathered.places, []
    if not any(facts["infiniband"] for facts in hosts.values()):
        return []
    for rank, facts in hosts.items():
        down = [
            name
            for name, port in facts["infiniband"].items()
            if "ACTIVE" not in (port["state"] or "")
        ]
        if down:
            words = f"{listed(down)} not active on {places.host(rank)}"
            advice = (
                "Look at ibstat and the cable. NCCL uses the other ports, which lowers the"
                " bandwidth."
            )
            findings.append(
                DoctorFinding(
                    "InfiniBand", WARNING, words, tuple(places.hosts[places.host(rank)]), advice
                )
            )
    if findings:
        return findings
    texts = {rank: _ports_text(facts["infiniband"]) for rank, facts in hosts.items()}
    return [
        alike("InfiniBand", texts, places, advice="All hosts need the same ports at the same rate.")
    ]


def _ports_text(found: dict[str, dict[str, str | None]]) -> str:
    rates = [port["rate"] or "unknown rate" for port in found.values()]
    return listed(f"{rates.count(rate)} x {rate}" for rate in sorted(set(rates))) or "no port"


def _interfaces(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge Ethernet, which several hosts without InfiniBand have to use."""
    hosts = gathered.of_hosts()
    texts = {rank: _interfaces_text(facts["net"]) for rank, facts in hosts.items()}
    speeds = {
        rank: max((_mbits(one["speed"]) for one in facts["net"].values()), default=0)
        for rank, facts in hosts.items()
    }
    finding = alike(
        "network",
        texts,
        gathered.places,
        verdict=WARNING,
        advice="Use hosts with the same interfaces.",
    )
    needed = (
        len(hosts) > 1
        and gathered.setup.accelerator == "gpu"
        and not any(facts["infiniband"] for facts in hosts.values())
    )
    if needed and finding.verdict == OK and 0 < max(speeds.values()) < _SLOW_MBITS:
        advice = (
            "Keep tp, cp and ep within a host, and use pp between hosts; or use hosts with"
            " InfiniBand or RoCE."
        )
        return [
            DoctorFinding("network", WARNING, f"{texts[min(texts)]}, no InfiniBand", (), advice)
        ]
    return [finding]


def _mbits(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


def _interfaces_text(found: dict[str, dict[str, str | None]]) -> str:
    words = []
    for name, one in found.items():
        speed = _mbits(one["speed"])
        words.append(f"{name} {one['state']}" + (f" {speed / 1000:g} Gb/s" if speed else ""))
    return listed(words) or "no interface"


def _axes(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Name the links that each axis uses, as the layout places its ranks."""
    findings = []
    layout, places = gathered.setup.layout, gathered.places
    groups = {axis: layout.groups(axis) for axis in AXES if layout.size(axis) > 1}
    if layout.ep > 1:
        groups["ep"] = layout.expert_groups()
    for axis, members in groups.items():
        used = {
            _between(gathered, first, second)
            for group in members
            for first, second in zip(group, group[1:], strict=False)
        }
        verdict = WARNING if axis == "tp" and "the network" in used else OK
        advice = (
            "A tensor-parallel group spans hosts, which is slow: use a smaller tp."
            if verdict == WARNING
            else ""
        )
        width = "within a host" if all(map(places.share_host, members)) else "between hosts"
        findings.append(
            DoctorFinding(f"{axis} uses", verdict, f"{listed(sorted(used))} ({width})", (), advice)
        )
    return findings


def _between(gathered: GatheredAnswers, first: int, second: int) -> str:
    """Name the link between two ranks."""
    if not gathered.places.share_host((first, second)):
        return "the network"
    if gathered.setup.accelerator == "cpu":
        return "shared memory of the host"
    return _link(gathered, first, second) or "an unknown link"


def _link(gathered: GatheredAnswers, first: int, second: int) -> str | None:
    """Return the name that nvidia-smi has for the link between the GPUs of two ranks of a host:
    NV18, PIX, ..."""
    host = gathered.places.hosts.get(gathered.places.host(first), [first])
    topology = (gathered.facts.get(host[0]) or {}).get("topology") or {}
    numbers = [(gathered.facts.get(rank) or {}).get("gpu") for rank in (first, second)]
    link: str | None = topology.get(f"GPU{numbers[0]}", {}).get(f"GPU{numbers[1]}")
    return link


CHECK = Check("links", measure, judge)
