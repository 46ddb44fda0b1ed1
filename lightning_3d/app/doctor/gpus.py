"""Check: the GPUs are alike, free, cool and without memory errors, before any work. The check of
compute looks at clocks under load."""

from __future__ import annotations

import os

from lightning_3d.app.doctor import nvidia_smi
from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import (
    OK,
    UNKNOWN,
    WARNING,
    WRONG,
    DoctorFinding,
    RankPlaces,
    alike,
)
from lightning_3d.app.planner.profile_file import gpu_types
from lightning_3d.storage.numbers import gibibytes

_MIB = 2**20
_USED_MIB = 1024
"""More memory than contexts of this command's own ranks need."""
_HOT_DEGREES = 85
"""NVIDIA's data-center GPUs slow down from about 87 degrees C on (`nvidia-smi -q -d TEMPERATURE`
prints the limits of a GPU)."""

BAD_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""Bits of the clock event reasons that halve the clock or show heat. Source, also for
`MILD_REASONS`: NVML's nvmlClocksEventReasons,
https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""
POWER_CAP = 0x04
MILD_REASONS = {0x02: "clocks set by the user", POWER_CAP: "power cap", 0x10: "sync boost"}


def measure(room: Room) -> Facts:
    """Return what nvidia-smi says about the GPU of this rank."""
    if room.setup.accelerator != "gpu":
        return {}
    rows = nvidia_smi.gpus()
    if rows is None:
        return {"missing": True}
    own = nvidia_smi.own_row(rows, room.local_rank, uuid_of(room.local_rank), os.environ)
    return {"row": own} if own is not None else {"missing": True}


def uuid_of(number: int) -> str | None:
    """Return the UUID that CUDA reports for a visible device; None if torch does not tell."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(number), "uuid", None)
    return str(uuid) if uuid is not None else None


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge each property of the GPUs of all ranks."""
    if gathered.setup.accelerator != "gpu":
        return [DoctorFinding("GPUs", OK, "the ranks run on CPUs")]
    rows = {rank: facts["row"] for rank, facts in gathered.facts.items() if "row" in facts}
    lacking = [rank for rank in gathered.facts if rank not in rows]
    places, findings = gathered.places, []
    if lacking:
        advice = "Install nvidia-smi there, or pass it into the container."
        findings.append(
            DoctorFinding(
                "nvidia-smi",
                UNKNOWN,
                f"no answer on {places.describe(lacking)}",
                tuple(lacking),
                advice,
            )
        )
    if not rows:
        return findings
    names = {rank: row["name"] for rank, row in rows.items()}
    findings += [
        alike("name", names, places, advice="The slowest GPU sets the speed: use equal ones."),
        *_as_stated(gathered, names),
    ]
    if is_simulated(gathered):
        findings.append(
            DoctorFinding(
                "simulated GPU",
                WARNING,
                "the GPUs are simulated: speeds and times say nothing about a real GPU",
            )
        )
    findings.append(
        alike(
            "memory",
            {rank: _size(row["memory"]) for rank, row in rows.items()},
            places,
            advice="Use equal GPUs.",
        )
    )
    return [
        *findings,
        _free(rows, places),
        _ecc(rows, places),
        _cool(rows, places),
        _clocks(rows, places),
        _mig(rows, places),
    ]


def _as_stated(gathered: GatheredAnswers, names: dict[int, str | None]) -> list[DoctorFinding]:
    """Find GPUs of another type than those of the cluster, whose datasheet would not apply."""
    cluster = gathered.setup.cluster
    stated = set(gpu_types(cluster.gpu or ""))
    other = tuple(
        rank
        for rank, name in names.items()
        if stated and (found := gpu_types(name or "")) and not stated & set(found)
    )
    if not other:
        return []
    words = (
        f"{names[other[0]]} on {gathered.places.describe(other)}, but the cluster {cluster.name}"
        f" has {cluster.gpu}"
    )
    advice = "Name the cluster that you have (cluster=...): bandwidths are compared with it."
    return [DoctorFinding("cluster", WARNING, words, other, advice)]


def is_simulated(gathered: GatheredAnswers) -> bool:
    """Check whether a GPU calls itself simulated."""
    facts = gathered.earlier.get("GPUs") or gathered.facts
    return any(nvidia_smi.names_simulated([one["row"]]) for one in facts.values() if one.get("row"))


def number(text: str | None, base: int = 10) -> int | None:
    """Read a whole number of nvidia-smi; None if there is none."""
    try:
        return int(text or "", base)
    except ValueError:
        return None


def _size(text: str | None) -> str | None:
    mib = number(text)
    return None if mib is None else gibibytes(mib * _MIB)


def _pick(rows: dict[int, nvidia_smi.Row], name: str) -> dict[int, int]:
    """Return a number by rank, of those ranks that have it."""
    values = {rank: number(row[name]) for rank, row in rows.items()}
    return {rank: value for rank, value in values.items() if value is not None}


def _free(rows: dict[int, nvidia_smi.Row], places: RankPlaces) -> DoctorFinding:
    used = _pick(rows, "used")
    if not used:
        return DoctorFinding("free memory", UNKNOWN, "no rank can tell")
    taken = tuple(rank for rank, mib in used.items() if mib > _USED_MIB)
    most = max(used, key=lambda rank: used[rank])
    if not taken:
        return DoctorFinding(
            "free memory", OK, f"at most {gibibytes(used[most] * _MIB)} of a GPU in use"
        )
    words = (
        f"{gibibytes(used[most] * _MIB)} in use on {places.describe([most])}; more than 1 GiB on"
        f" {places.describe(taken)}"
    )
    return DoctorFinding(
        "free memory",
        WARNING,
        words,
        taken,
        "Another process uses this GPU: find it with nvidia-smi, and end it.",
    )


def _ecc(rows: dict[int, nvidia_smi.Row], places: RankPlaces) -> DoctorFinding:
    errors = _pick(rows, "ecc")
    if not errors:
        return DoctorFinding("ECC errors", UNKNOWN, "these GPUs do not count them, or ECC is off")
    bad = tuple(rank for rank, count in errors.items() if count)
    if not bad:
        return DoctorFinding("ECC errors", OK, "none uncorrected since the last reset")
    words = f"{max(errors.values())} uncorrected on {places.describe(bad)}"
    return DoctorFinding(
        "ECC errors",
        WRONG,
        words,
        bad,
        "Reset this GPU or leave it out: its memory returns wrong values.",
    )


def _cool(rows: dict[int, nvidia_smi.Row], places: RankPlaces) -> DoctorFinding:
    degrees = _pick(rows, "temperature")
    if not degrees:
        return DoctorFinding("temperature", UNKNOWN, "no rank can tell")
    hot = tuple(rank for rank, value in degrees.items() if value >= _HOT_DEGREES)
    if not hot:
        return DoctorFinding("temperature", OK, f"at most {max(degrees.values())} C")
    words = f"{max(degrees.values())} C on {places.describe(hot)}"
    return DoctorFinding(
        "temperature",
        WARNING,
        words,
        hot,
        "Look at the cooling of this host: a hot GPU lowers its clock.",
    )


def _clocks(rows: dict[int, nvidia_smi.Row], places: RankPlaces) -> DoctorFinding:
    """Judge the reasons for a low clock at rest: an idle GPU may have a low clock, but no
    slowdown."""
    return reasons_finding("clock events", rows, places)


def reasons_finding(
    name: str, rows: dict[int, nvidia_smi.Row], places: RankPlaces, usual: int = 0
) -> DoctorFinding:
    """Judge the reasons for which the clocks of some GPUs are lowered.

    Args:
        usual: bits that say nothing here.
    """
    bits = {rank: number(row["reasons"], 16) for rank, row in rows.items()}
    known = {rank: value & ~usual for rank, value in bits.items() if value is not None}
    if not known:
        return DoctorFinding(name, UNKNOWN, "the driver does not tell why clocks are low")
    for reasons, verdict, advice in (
        (
            BAD_REASONS,
            WRONG,
            "Look at cooling and power supply of this host: its GPU is slowed down.",
        ),
        (
            MILD_REASONS,
            WARNING,
            "Look at nvidia-smi -q -d CLOCK,POWER on this host: a limit is set there.",
        ),
    ):
        low = {
            rank: [word for bit, word in reasons.items() if value & bit]
            for rank, value in known.items()
        }
        ranks = tuple(rank for rank, words in low.items() if words)
        if ranks:
            words = sorted({word for rank in ranks for word in low[rank]})
            return DoctorFinding(
                name, verdict, f"{' and '.join(words)} on {places.describe(ranks)}", ranks, advice
            )
    return DoctorFinding(name, OK, "no slowdown")


def _mig(rows: dict[int, nvidia_smi.Row], places: RankPlaces) -> DoctorFinding:
    on = tuple(rank for rank, row in rows.items() if (row["mig"] or "").lower() == "enabled")
    if not on:
        return DoctorFinding("MIG", OK, "off")
    advice = "NCCL does not connect slices of one GPU. Turn MIG off: nvidia-smi -mig 0."
    return DoctorFinding("MIG", WARNING, f"on for {places.describe(on)}", on, advice)


CHECK = Check("GPUs", measure, judge)
