"""The report as values of JSON: findings, facts of all ranks, and measured collectives as
`lightning-3d plan profile=FILE` reads them."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from lightning_3d.app.doctor.examination import Report
from lightning_3d.app.doctor.links_rate import by_group
from lightning_3d.app.doctor.table import is_simulated
from lightning_3d.app.planner.profile_file import LINKS_FORMAT


def as_data(report: Report) -> dict[str, Any]:
    """Return everything that was measured and found."""
    gpus = [facts["row"] for facts in report.facts.get("GPUs", {}).values() if facts.get("row")]
    hosts = report.places.hosts
    return {
        "format": LINKS_FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": "cuda" if report.setup.accelerator == "gpu" else "cpu",
        "name": str(gpus[0]["name"]) if gpus else "CPU",
        "simulated": is_simulated(report),
        "ranks": report.places.world_size,
        "ranks_per_node": max((len(ranks) for ranks in hosts.values()), default=1),
        "layout": report.setup.layout.name,
        "cluster": report.setup.cluster.name,
        "exit_code": report.exit_code,
        "seconds": report.seconds,
        "operations": operations(report),
        "places": [asdict(place) for _, place in sorted(report.places.by_rank.items())],
        "findings": {
            name: [asdict(finding) for finding in findings]
            for name, findings in report.findings.items()
        },
        "facts": {
            name: {str(rank): facts for rank, facts in by_rank.items()}
            for name, by_rank in report.facts.items()
        },
    }


def operations(report: Report) -> list[dict[str, Any]]:
    """Return the collectives of each group as measurements of a profile.

    `node`: all ranks of the group are on one host; `between`: each is on another host; `mixed`
    groups are neither, and a planner does not use them.
    """
    entries = [
        one
        for facts in report.facts.get("collectives", {}).values()
        for one in facts["collectives"]
    ]
    found = []
    for ((axis, name), size), groups in by_group(entries).items():
        for ranks, seconds in groups.items():
            count = len({report.places.host(rank) for rank in ranks})
            placement = "node" if count == 1 else "between" if count == len(ranks) else "mixed"
            one = {
                "kind": "collective",
                "name": name,
                "placement": placement,
                "ranks": len(ranks),
                "bytes": size,
                "seconds": seconds,
            }
            found.append(one | {"axis": axis, "group": list(ranks)})
    return found
