"""Write `sweep.html` of a sweep from `sweep.csv` in its folder and the reports of its jobs."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_3d.app.runs.report.page import write_page
from lightning_3d.app.runs.report.run import REPORT_FILE
from lightning_3d.errors import ConfigError

SWEEP_FILE = "sweep.csv"
SWEEP_REPORT_FILE = "sweep.html"

NUMBERS = {
    "tokens_per_second": {"name": "tokens/s", "better": "more", "format": "count"},
    "memory": {"name": "memory", "better": "less", "format": "bytes"},
    "bubble": {"name": "bubble", "better": "less", "format": "percent"},
    "loss": {"name": "loss", "better": "less", "format": "plain"},
    "val_loss": {"name": "validation loss", "better": "less", "format": "plain"},
    "step_seconds": {"name": "step", "better": "less", "format": "seconds"},
    "seconds": {"name": "time", "better": "less", "format": "seconds"},
}
"""Numbers of a job that are shown, in the order of the columns, and whether more or less is
better."""

_OTHERS = ("job", "layout", "status", "exit_code", "reason", "grad_norm", "folder", *NUMBERS)
_LAYOUT = "parallelism"
"""The swept group whose values are layouts: for a job that was skipped nothing else names its
layout."""

_CLASSES = {"failed", "finished", "interrupted", "skipped", "running"}


def write_sweep_report(folder: Path) -> Path:
    """Write `sweep.html` next to `sweep.csv`.

    Raises:
        ConfigError: there is no `sweep.csv`, or the folder cannot be written.
    """
    try:
        with (folder / SWEEP_FILE).open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(
            f"{folder} is not the folder of a sweep: cannot read {SWEEP_FILE} ({error.strerror})."
        ) from error
    keys = [key for key in (rows[0] if rows else ()) if key not in _OTHERS and key != _LAYOUT]
    jobs = [_job(folder, row, keys) for row in rows]
    shown = [name for name in NUMBERS if any(name in job["numbers"] for job in jobs)]
    counts = Counter(job["status"] for job in jobs)
    page = {
        "title": folder.absolute().name,
        "folder": str(folder.absolute()),
        "jobs": len(jobs),
        "counts": list(counts.items()),
        "over": [*(["layout"] if rows and _LAYOUT in rows[0] else []), *keys],
        "layouts": any(job["layout"] for job in jobs),
    }
    data = {
        "jobs": jobs,
        "keys": keys,
        "numbers": {name: NUMBERS[name] for name in shown},
        "layouts": page["layouts"],
    }
    try:
        return write_page(
            folder / SWEEP_REPORT_FILE, "sweep.html.j2", ["charts.js", "sweep.js"], data, sweep=page
        )
    except OSError as error:
        raise ConfigError(f"Cannot write the report into {folder}: {error.strerror}.") from error


def _job(folder: Path, row: Mapping[str, str], keys: list[str]) -> dict[str, Any]:
    numbers = {name: float(row[name]) for name in NUMBERS if row.get(name)}
    run = Path(row["folder"]) if row.get("folder") else None
    report = run / REPORT_FILE if run is not None else None
    link = (
        os.path.relpath(report, folder).replace(os.sep, "/")
        if report is not None and report.is_file()
        else None
    )
    status = row.get("status") or ""
    return {
        "job": int(row["job"]),
        "layout": row.get("layout") or row.get(_LAYOUT) or "",
        "values": [row.get(key) or "" for key in keys],
        "status": status,
        "badge": status if status in _CLASSES else "",
        "reason": row.get("reason") or "",
        "numbers": numbers,
        "report": link,
    }
