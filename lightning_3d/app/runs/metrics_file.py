"""Read and write the CSV files of a run, one row per step. Imports no torch."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_3d.storage.json_file import replace_text


def read_rows(path: Path, last_step: int | None = None) -> list[dict[str, str]]:
    """Read the rows of a metrics file; none when there is no file. A last row that a crash
    truncated is left out.

    Args:
        last_step: the last step to read; None: all steps.
    """
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if None not in row.values() and (row.get("step") or "").isdigit()
        ]
    return [row for row in rows if last_step is None or int(row["step"]) <= last_step]


def csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write rows as text. Missing values are empty cells; other columns are left out."""
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n").writerows(
        rows
    )
    return text.getvalue()


def keep_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Leave these columns and rows alone in a file that has more rows at its end, or create it. A
    kill or a full disk loses no row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = csv_lines(columns, [dict(zip(columns, columns, strict=True)), *rows])
    content = text.encode()
    if path.is_file() and path.read_bytes().startswith(content):
        os.truncate(path, len(content))  # needs no room, and writes no row again
    else:
        replace_text(path, text)


def column(rows: Iterable[Mapping[str, str]], name: str) -> list[float]:
    """Read the numbers of a column; empty cells are left out."""
    values = []
    for row in rows:
        try:
            values.append(float(row.get(name) or ""))
        except ValueError:  # an empty cell
            continue
    return values
