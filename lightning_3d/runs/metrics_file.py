"""Read `metrics.csv` of a run. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path


def read_rows(path: Path, last_step: int | None = None) -> list[dict[str, str]]:
    """Read the rows of a metrics file; none when there is no file. A last row that a crash truncated is left out.

    Args:
        last_step: the last step to read; None: all steps.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [row for row in csv.DictReader(file) if None not in row.values() and (row.get("step") or "").isdigit()]
    return [row for row in rows if last_step is None or int(row["step"]) <= last_step]


def column(rows: Iterable[Mapping[str, str]], name: str) -> list[float]:
    """Read the numbers of a column; empty cells are left out."""
    values = []
    for row in rows:
        try:
            values.append(float(row.get(name) or ""))
        except ValueError:  # an empty cell
            continue
    return values
