"""Check: all ranks multiply matrices at the same speed. A slow rank makes all others wait in every
step."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_3d.app.doctor import nvidia_smi
from lightning_3d.app.doctor.check import Check, Facts, GatheredAnswers, Room
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG, DoctorFinding, slow_ones
from lightning_3d.app.doctor.gpus import POWER_CAP, is_simulated, number, reasons_finding, uuid_of
from lightning_3d.app.planner.advice import machine_of

_SIZES = {"cpu": 512, "cuda": 8192}
_SECONDS = {"cpu": 0.3, "cuda": 1.0}
_SLOW, _TOO_SLOW = 0.9, 0.75
"""Shares of the median speed below which a rank is worth a warning, and wrong. Equal GPUs differ by
8 % on average, and outliers are 1.5 times slower than the median (Sinha et al., "Not All GPUs Are
Created Equal", SC 2022, abstract)."""
_SLOW_CPU = 0.6
"""Cores are shared with the system and other processes."""
_BUSY_SECONDS = 2.0
"""Time for which a GPU works while nvidia-smi is asked, which takes less."""
_LOW_CLOCK = 0.6
"""Share of the maximum clock below which a GPU under load is slowed down; power limits alone cost
less."""


def measure(room: Room) -> Facts:
    """Multiply matrices for a second, and ask for the clock while the GPU works."""
    import torch

    device = room.device()
    small = device.type == "cuda" and nvidia_smi.are_simulated()
    size = 64 if small else _SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (
        torch.randn(size, size, device=device, dtype=dtype),
        torch.randn(size, size, device=device, dtype=dtype),
    )
    result = torch.empty_like(left)

    def seconds(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=result)
        room.wait()
        return (time.perf_counter() - started) / count

    seconds(3)
    count = 3 if small else max(3, int(_SECONDS[device.type] / 5 / max(seconds(3), 1e-6)))
    times = [seconds(count) for _ in range(5)]
    facts: Facts = {
        "size": size,
        "rate": 2 * size**3 / statistics.median(times),
        "seconds": statistics.median(times),
    }
    if device.type == "cpu":
        return facts
    repeats = 1 if small else int(_BUSY_SECONDS / max(times[0], 1e-4))
    return facts | {"row": _busy_row(room, partial(torch.mm, left, right, out=result), repeats)}


def _busy_row(room: Room, work: Callable[[], Any], count: int) -> nvidia_smi.Row | None:
    """Ask nvidia-smi about the GPU while it works."""
    for _ in range(max(1, count)):
        work()
    rows = nvidia_smi.gpus(
        ("index", "uuid", "name", "clock", "max_clock", "reasons", "temperature")
    )
    row = (
        nvidia_smi.own_row(rows, room.local_rank, uuid_of(room.local_rank), os.environ)
        if rows
        else None
    )
    room.wait()
    return row


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Compare the speeds of all ranks, with each other and with the cluster's datasheet."""
    rates = {rank: float(facts["rate"]) for rank, facts in gathered.facts.items()}
    places = gathered.places
    real = gathered.setup.accelerator == "gpu" and not is_simulated(gathered)
    median = statistics.median(rates.values())
    # times of simulated GPUs say nothing
    least = _SLOW if real else _SLOW_CPU if gathered.setup.accelerator == "cpu" else 0.0
    findings = []
    for rank, (verdict, share) in slow_ones(rates, least, _TOO_SLOW).items():
        words = (
            f"{places.describe([rank])} reaches {_flops(rates[rank])}, {share:.0%} of the median"
        )
        advice = (
            "Another process, heat or a power limit slows it down; look at it, or leave this host"
            " out."
        )
        findings.append(
            DoctorFinding("slow rank", verdict if real else WARNING, words, (rank,), advice)
        )
    spread = (
        f"{_flops(min(rates.values()))} to {_flops(max(rates.values()))}, median {_flops(median)}"
    )
    findings.append(DoctorFinding("matrix product", OK, spread))
    return [*findings, *_against_datasheet(gathered, median, real), *_under_load(gathered)]


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def _against_datasheet(gathered: GatheredAnswers, median: float, real: bool) -> list[DoctorFinding]:
    if not real:
        return []
    machine = machine_of(gathered.setup.cluster)
    if machine is None:
        advice = "Name the cluster to compare with its datasheet, for example cluster=h100."
        return [DoctorFinding("datasheet", UNKNOWN, "the cluster states no speed", advice=advice)]
    share = median / (machine.peak * machine.efficiency.matmul)
    words = (
        f"{share:.0%} of the {_flops(machine.peak * machine.efficiency.matmul)} that {machine.gpu}"
        " reaches"
    )
    if share >= _SLOW:
        return [DoctorFinding("datasheet", OK, words)]
    advice = (
        "Check that the cluster's name is right, and look at power limits and clocks (nvidia-smi -q"
        " -d CLOCK,POWER)."
    )
    return [
        DoctorFinding("datasheet", WARNING if share >= _TOO_SLOW else WRONG, words, advice=advice)
    ]


def _under_load(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge the clocks of GPUs that work."""
    rows = {rank: facts["row"] for rank, facts in gathered.facts.items() if facts.get("row")}
    if not rows:
        return (
            []
            if gathered.setup.accelerator == "cpu"
            else [DoctorFinding("clock under load", UNKNOWN, "nvidia-smi does not tell")]
        )
    shares = {}
    for rank, row in rows.items():
        clock, most = number(row["clock"]), number(row["max_clock"])
        if clock and most:
            shares[rank] = clock / most
    # Large matrix products take all the power that a GPU may have; its clock below tells whether
    # that is enough.
    findings = [reasons_finding("events under load", rows, gathered.places, usual=POWER_CAP)]
    if not shares:
        return [DoctorFinding("clock under load", UNKNOWN, "the driver does not tell"), *findings]
    low = tuple(rank for rank, share in shares.items() if share < _LOW_CLOCK)
    words = f"at least {min(shares.values()):.0%} of the maximum"
    if not low:
        return [DoctorFinding("clock under load", OK, words), *findings]
    least = min(low, key=lambda rank: shares[rank])
    words = (
        f"{rows[least]['clock']} of {rows[least]['max_clock']} MHz on"
        f" {gathered.places.describe(low)}"
    )
    advice = (
        "Look at cooling, power limit and fixed clocks of this GPU (nvidia-smi -q -d CLOCK,POWER)."
    )
    return [DoctorFinding("clock under load", WRONG, words, low, advice), *findings]


CHECK = Check("compute", measure, judge)
