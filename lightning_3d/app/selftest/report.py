"""The table and the JSON file of a self-test."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_3d.app.selftest.judge import (
    BAD,
    EXACT,
    FAILED,
    HANGS,
    NOT_REACHED,
    SKIPPED,
    WRONG,
    Verdict,
)
from lightning_3d.app.selftest.session import Session

WIDTH = 100
FORMAT = 1
_HEADER = (
    f"{'technique':<30} {'layout':<12} {'in':<4} {'loss':>7} {'norm':>7} {'weights':>7} "
    f" {'allowed':<17} verdict"
)


def table(session: Session) -> str:
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


def _line(verdict: Verdict) -> str:
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


def is_wrong(session: Session) -> bool:
    """True if a cell is wrong, failed or hangs."""
    return any(verdict.verdict in BAD for verdict in session.verdicts)


def write(session: Session, path: Path) -> None:
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


def _entry(verdict: Verdict) -> dict[str, Any]:
    entry = asdict(verdict)
    entry["cell"] |= {"tolerances": verdict.cell.tolerances, "ranks": verdict.cell.ranks}
    return entry


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, (list, tuple)) else value
