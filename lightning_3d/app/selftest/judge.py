"""Verdict on a cell: the largest relative differences between its ranks and the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_3d.app.selftest.cells import Cell
from lightning_3d.app.selftest.models import Result
from lightning_3d.app.selftest.rank import Part

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
class Verdict:
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


def compare(cell: Cell, parts: Sequence[Part], reference: Result) -> Verdict:
    """Compare the values and shards of all ranks with the reference."""
    weight, worst = _weights(parts, reference)
    loss = max((_relative(part.losses, reference.losses) for part in parts), key=_nan_is_largest)
    norm = max((_relative(part.norms, reference.norms) for part in parts), key=_nan_is_largest)
    differences = loss, norm, weight
    losses = tuple(zip(parts[0].losses, reference.losses, strict=False))
    norms = tuple(zip(parts[0].norms, reference.norms, strict=False))
    return Verdict(cell, judge(cell, differences), differences, worst, losses=losses, norms=norms)


def _weights(parts: Sequence[Part], reference: Result) -> tuple[float, str]:
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
