"""Verdicts of a self-test: the largest relative differences between ranks and the reference, their
table and their JSON file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lightning_3d.app.verification.cell_ranks import RankResult
from lightning_3d.app.verification.cells import Cell
from lightning_3d.app.verification.tiny_models import ReferenceResult

EXACT, WRONG, FAILED, HANGS, SKIPPED, NOT_REACHED = (
    "exact",
    "WRONG",
    "FAILED",
    "HANGS",
    "skipped",
    "not reached",
)
BAD = (WRONG, FAILED, HANGS)


@dataclass(frozen=True)
class CellVerdict:
    """Outcome of a cell.

    Attributes:
        verdict: one of the words above.
        differences: largest relative differences of loss, gradient norm and weights; None if the
            cell has no numbers. For attention: of output, log-sum-exp and gradients.
        why: reason for a cell that was not compared, or the name of the worst weight.
        trace: tracebacks or stacks.
        losses: (ranks, reference) of each step.
        norms: (ranks, reference) of each step.
        seconds: time of the cell.
    """

    cell: Cell
    verdict: str
    differences: tuple[float, float, float] | None = None
    why: str = ""
    trace: str = ""
    losses: tuple[tuple[float, float], ...] = ()
    norms: tuple[tuple[float, float], ...] = ()
    seconds: float = 0.0


def judge(cell: Cell, differences: Sequence[float]) -> str:
    """Return the verdict on differences; NaN is wrong."""
    return (
        EXACT
        if all(value <= limit for value, limit in zip(differences, cell.tolerances, strict=True))
        else WRONG
    )


def compare(cell: Cell, parts: Sequence[RankResult], reference: ReferenceResult) -> CellVerdict:
    """Compare the values and shards of all ranks with the reference."""
    weight, worst = _weights(parts, reference)
    loss = max((_relative(part.losses, reference.losses) for part in parts), key=_nan_is_largest)
    norm = max((_relative(part.norms, reference.norms) for part in parts), key=_nan_is_largest)
    differences = loss, norm, weight
    losses = tuple(zip(parts[0].losses, reference.losses, strict=False))
    norms = tuple(zip(parts[0].norms, reference.norms, strict=False))
    return CellVerdict(
        cell, judge(cell, differences), differences, worst, losses=losses, norms=norms
    )


def _weights(parts: Sequence[RankResult], reference: ReferenceResult) -> tuple[float, str]:
    """Find the largest relative difference of a shard of a parameter (a quotient of norms), and the
    parameter's name."""
    found: set[str] = set()
    largest, worst = -1.0, ""
    for part in parts:
        for name, (local, spec) in part.shards.items():
            known = spec.tied_to or name
            wanted = spec.cut(reference.weights[known]).float()
            found.add(known)
            relative = (
                ((wanted - local.float()).norm() / wanted.norm().clamp_min(1e-12)).item()
                if local.numel()
                else 0.0
            )
            if not relative <= largest:
                largest, worst = relative, known
    missing = reference.weights.keys() - found
    return (float("nan"), f"no rank has {min(missing)}") if missing else (largest, worst)


def _relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    if len(found) != len(wanted):
        return float("nan")
    return (
        torch.tensor(
            [
                abs(one - other) / max(abs(other), 1e-12)
                for one, other in zip(found, wanted, strict=True)
            ]
        )
        .max()
        .item()
    )


def _nan_is_largest(value: float) -> float:
    return math.inf if math.isnan(value) else value


@dataclass(frozen=True)
class SelfTest:
    """Finished self-test: a description of the machine, and the verdict on each cell."""

    machine: dict[str, Any]
    verdicts: list[CellVerdict]


# The table and the file

WIDTH = 100
FORMAT = 1
_HEADER = (
    f"{'technique':<30} {'layout':<12} {'in':<4} {'loss':>7} {'norm':>7} {'weights':>7} "
    f" {'allowed':<17} verdict"
)


def table(session: SelfTest) -> str:
    """Return the table: a line of at most `WIDTH` columns for each cell, and the counts."""
    counts = Counter(verdict.verdict for verdict in session.verdicts)
    known = (EXACT, WRONG, FAILED, HANGS, SKIPPED, NOT_REACHED)
    total = ", ".join(f"{counts[word]} {word}" for word in known if counts[word])
    title = "Largest relative differences between ranks and a plain loop on one rank."
    return "\n".join(
        [_place(session.machine), title, "", _HEADER, *map(_line, session.verdicts), "", total]
    )


def _place(machine: dict[str, Any]) -> str:
    if machine["accelerator"] == "cpu":
        return f"CPU ranks on {machine['cores']} cores, torch {machine['libraries']['torch']}"
    ranks, gpus, devices = machine["ranks"], machine["gpus"], machine["devices"]
    shares = ranks > gpus  # then a rank sees its own GPU only
    kinds = (
        f"{gpus} x {devices[0]}"
        if shares
        else ", ".join(f"{count} x {name}" for name, count in Counter(devices).items())
    )
    simulated = "simulated GPU: " if machine["simulated"] else ""
    shared = f"{ranks} ranks share " if shares else ""
    return f"{simulated}{shared}{kinds}, torch {machine['libraries']['torch']}"


def _line(verdict: CellVerdict) -> str:
    cell = verdict.cell
    start = f"{cell.technique:<30} {cell.shown_layout:<12} {cell.precision:<4} "
    if verdict.differences is None:
        text = f"{start}{verdict.verdict}: {verdict.why}"
    else:
        numbers = " ".join(f"{value:7.0e}" for value in verdict.differences)
        text = (
            f"{start}{numbers}  {' '.join(f'{limit:.0e}' for limit in cell.tolerances):<17}"
            f" {verdict.verdict}"
        )
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def is_wrong(session: SelfTest) -> bool:
    """True if a cell is wrong, failed or hangs."""
    return any(verdict.verdict in BAD for verdict in session.verdicts)


def write(session: SelfTest, path: Path) -> None:
    """Write all numbers, tracebacks and the machine's description. NaN becomes null, which JSON
    has."""
    content = {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": session.machine,
        "wrong": is_wrong(session),
        "cells": [_entry(verdict) for verdict in session.verdicts],
    }
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(_finite(content), indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def _entry(verdict: CellVerdict) -> dict[str, Any]:
    entry = asdict(verdict)
    entry["cell"] |= {"tolerances": verdict.cell.tolerances, "ranks": verdict.cell.ranks}
    return entry


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value
