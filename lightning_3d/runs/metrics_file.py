"""`metrics.csv` of a run, for those who read it. Imports no torch."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a metrics file; none when there is no file. A last row cut off by a crash is left out."""
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return [row for row in csv.DictReader(file) if None not in row.values() and (row.get("step") or "").isdigit()]


def column(rows: Iterable[Mapping[str, str]], name: str) -> list[float]:
    """The numbers of a column; empty cells are left out."""
    values = []
    for row in rows:
        try:
            values.append(float(row.get(name) or ""))
        except ValueError:  # an empty cell
            continue
    return values
