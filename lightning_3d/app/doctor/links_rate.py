"""Judge the measured bandwidth and latency of collectives, and name slow groups, pairs and ranks.
Pure Python."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_3d.app.doctor.check import GatheredAnswers
from lightning_3d.app.doctor.findings import OK, UNKNOWN, WARNING, WRONG, DoctorFinding, slow_ones
from lightning_3d.app.doctor.gpus import is_simulated
from lightning_3d.app.planner.advice import machine_of
from lightning_3d.app.planner.machine import MESSAGES, Group, Machine, ring_rate
from lightning_3d.errors import plural
from lightning_3d.storage.numbers import show_bytes

_SLOW, _TOO_SLOW = 0.75, 0.5
"""Shares of the expected bandwidth, and of the median of equal groups and pairs, that are worth a
warning, and wrong."""
_SLOW_CPU = 0.4
"""CPU ranks share cores, whose times vary more."""
_LATE = {"node": 200e-6, "between": 500e-6}
"""Seconds of a small collective per two ranks that no healthy link needs: NCCL takes about 20 and
50 microseconds."""

Entry = Mapping[str, Any]
Key = tuple[str, str]


def by_group(entries: Sequence[Entry]) -> dict[tuple[Key, int], dict[tuple[int, ...], float]]:
    """Return the seconds of the slowest rank of each group, by ((axis, collective), bytes) and
    group."""
    found: dict[tuple[Key, int], dict[tuple[int, ...], float]] = {}
    for one in entries:
        groups = found.setdefault(((one["axis"], one["name"]), one["bytes"]), {})
        ranks = tuple(one["group"])
        groups[ranks] = max(groups.get(ranks, 0.0), one["seconds"])
    return found


def rate(name: str, ranks: int, size: float, seconds: float) -> float:
    """Return the bytes a second that leave each rank of a group."""
    return MESSAGES[name](ranks)[1] * size / max(seconds, 1e-9)


def judge(gathered: GatheredAnswers) -> list[DoctorFinding]:
    """Judge the collectives of each axis, then pairs of neighbors."""
    entries = [one for facts in gathered.facts.values() for one in facts["collectives"]]
    if not entries:
        return [
            DoctorFinding(
                "collectives",
                OK,
                f"the layout {gathered.setup.layout} has one rank, which sends nothing",
            )
        ]
    real = gathered.setup.accelerator == "gpu" and not is_simulated(gathered)
    found = by_group(entries)
    findings = []
    for key in dict.fromkeys(key for key, _ in found):
        small, large = (dict(found[key, size]) for size in _sizes(found, key))
        findings += _of_case(
            gathered, key, min(_sizes(found, key)), small, max(_sizes(found, key)), large, real
        )
    return [*findings, *_pairs(gathered, real)]


def _least(gathered: GatheredAnswers, real: bool) -> float:
    """Return the share of the median that is worth a warning. Times of simulated GPUs say
    nothing."""
    return _SLOW if real else _SLOW_CPU if gathered.setup.accelerator == "cpu" else 0.0


def _sizes(found: Mapping[tuple[Key, int], Any], key: Key) -> tuple[int, int]:
    sizes = sorted(size for other, size in found if other == key)
    return sizes[0], sizes[-1]


def _of_case(
    gathered: GatheredAnswers,
    key: Key,
    tiny: int,
    small: Mapping[tuple[int, ...], float],
    size: int,
    large: Mapping[tuple[int, ...], float],
    real: bool,
) -> list[DoctorFinding]:
    """Judge one collective of one axis in all its groups."""
    axis, name = key
    rates = {ranks: rate(name, len(ranks), size, seconds) for ranks, seconds in large.items()}
    title = f"{axis} {name.replace('_', '-')}"
    slow = slow_ones(rates, _least(gathered, real), _TOO_SLOW)
    findings = []
    for ranks, (verdict, share) in slow.items():
        words = (
            f"{gathered.places.describe(ranks)}: {_rate_text(rates[ranks])}, {share:.0%} of the"
            " median group"
        )
        advice = (
            "Look below for a slow pair or rank of this group; else at the links and adapters of"
            " these hosts."
        )
        findings.append(
            DoctorFinding(
                f"{title}, slow group", verdict if real else WARNING, words, ranks, advice
            )
        )
    worst = min(rates, key=lambda ranks: rates[ranks])
    latency = max(small.values())
    words = (
        f"{_rate_text(rates[worst])}, {time_text(latency)} for {tiny} B;"
        f" {_groups_text(list(rates))}"
    )
    verdict, expected, advice = _against_datasheet(gathered, rates[worst], worst, real)
    findings.append(
        DoctorFinding(
            title,
            verdict,
            f"{words}{expected}",
            worst if verdict in (WARNING, WRONG) else (),
            advice,
        )
    )
    return findings + (_late(gathered, title, name, small) if real else [])


def _groups_text(groups: Sequence[tuple[int, ...]]) -> str:
    return (
        f"slowest of {len(groups)} groups of {len(groups[0])}"
        if len(groups) > 1
        else f"1 group of {len(groups[0])}"
    )


def _rate_text(value: float) -> str:
    return f"{show_bytes(value)}/s"


def time_text(seconds: float) -> str:
    """Show a short time with three digits."""
    return f"{seconds * 1e6:.3g} us" if seconds < 999.5e-6 else f"{seconds * 1e3:.3g} ms"


def _against_datasheet(
    gathered: GatheredAnswers, value: float, ranks: tuple[int, ...], real: bool
) -> tuple[str, str, str]:
    """Return (verdict, words, advice) of a bandwidth against the share of the datasheet that
    software reaches."""
    if not real:
        return OK, "", ""
    machine = machine_of(gathered.setup.cluster)
    if machine is None:
        return (
            UNKNOWN,
            "; the cluster states no bandwidth",
            "Name the cluster to compare with its datasheet, for example cluster=h100.",
        )
    promised = expected_rate(machine, gathered, ranks)
    share = value / promised
    words = f"; {share:.0%} of {_rate_text(promised)} ({machine.gpu})"
    if share >= _SLOW:
        return OK, words, ""
    advice = (
        "Run with NCCL_DEBUG=INFO: it names the transport of each link. Look at the links and"
        " variables above."
    )
    return (WARNING if share >= _TOO_SLOW else WRONG), words, advice


def expected_rate(machine: Machine, gathered: GatheredAnswers, ranks: Sequence[int]) -> float:
    """Return the bytes a second that should leave each rank of a group."""
    on_host = Counter(gathered.places.host(rank) for rank in ranks)
    return ring_rate(machine, Group(len(ranks), max(on_host.values())))


def _late(
    gathered: GatheredAnswers, title: str, name: str, small: Mapping[tuple[int, ...], float]
) -> list[DoctorFinding]:
    """Find groups whose small messages are too late for any healthy link."""
    findings = []
    for ranks, seconds in small.items():
        messages = max(1, MESSAGES[name](len(ranks))[0] / 2)
        if seconds > messages * _LATE["node" if gathered.places.share_host(ranks) else "between"]:
            words = f"{time_text(seconds)} for a small message on {gathered.places.describe(ranks)}"
            advice = (
                "Look at NCCL_NET and NCCL_IB_DISABLE: TCP has such latencies. Or a CPU is busy on"
                " one of these hosts."
            )
            findings.append(DoctorFinding(f"{title}, latency", WARNING, words, ranks, advice))
    return findings


def _pairs(gathered: GatheredAnswers, real: bool) -> list[DoctorFinding]:
    """Compare neighbors within hosts, and between hosts; name the rank that all slow pairs have in
    common."""
    pairs = {
        tuple(one["ranks"]): one["bytes"] / one["seconds"]
        for facts in gathered.facts.values()
        for one in facts["pairs"]
    }
    findings = []
    for inside, title in ((True, "pairs within a host"), (False, "pairs between hosts")):
        rates = {
            pair: value
            for pair, value in pairs.items()
            if gathered.places.share_host(pair) == inside
        }
        if not rates:
            continue
        slow = slow_ones(rates, _least(gathered, real), _TOO_SLOW)
        words = (
            f"{plural(len(rates), 'pair')}: median {_rate_text(statistics.median(rates.values()))}"
        )
        words += f", lowest {_rate_text(min(rates.values()))}"
        findings.append(
            DoctorFinding(title, OK, words)
            if not slow
            else _slow_pairs(gathered, title, rates, slow, real)
        )
    return findings


def _slow_pairs(
    gathered: GatheredAnswers,
    title: str,
    rates: Mapping[Any, float],
    slow: Mapping[Any, tuple[str, float]],
    real: bool,
) -> DoctorFinding:
    shared = set.intersection(*(set(pair) for pair in slow))
    verdict = WRONG if real and any(one == WRONG for one, _ in slow.values()) else WARNING
    words = ", ".join(
        f"{first} and {second}: {_rate_text(rates[first, second])}"
        for first, second in sorted(slow)[:4]
    )
    words += f" and {len(slow) - 4} more" if len(slow) > 4 else ""
    words += f"; median {_rate_text(statistics.median(rates.values()))}"
    if len(slow) > 1 and len(shared) == 1:
        ranks = tuple(shared)
        words = f"all slow pairs have {gathered.places.describe(ranks)} ({words})"
        advice = "Look at this GPU, its adapter and its cable; or leave this host out."
    else:
        ranks = tuple(sorted({rank for pair in slow for rank in pair}))
        words = f"{gathered.places.describe(ranks)}: ranks {words}"
        advice = "Look at the link between these ranks: adapters, cables, and switches."
    return DoctorFinding(title, verdict, words, ranks, advice)
