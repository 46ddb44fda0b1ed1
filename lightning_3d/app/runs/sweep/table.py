"""The comparison at the end of a sweep: `sweep.csv`, and a plain table that fits the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_3d.app.runs.report.sweep import SWEEP_FILE
from lightning_3d.app.runs.sweep.results import METRICS, Outcome
from lightning_3d.storage.json_file import replace_text
from lightning_3d.storage.numbers import show_memory

_FEWEST_CHARACTERS = 6
_GAP = "  "


def assigned(overrides: Iterable[str]) -> dict[str, str]:
    """Split overrides into keys and values: `+a.b=1` is `a.b` and `1`."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def swept_keys(outcomes: Sequence[Outcome], known: Iterable[str] = ()) -> list[str]:
    """List the keys that the command line sweeps or in which jobs differ, in the order of the
    command line."""
    jobs = [assigned(outcome.overrides) for outcome in outcomes]
    keys = list(dict.fromkeys(key for job in jobs for key in job))
    return [key for key in keys if key in known or len({job.get(key) for job in jobs}) > 1]


def write_csv(folder: Path, outcomes: Sequence[Outcome], keys: Sequence[str]) -> Path:
    """Write `sweep.csv` atomically: one row per job, with full values. An empty cell is a number
    that does not exist."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["job", *keys, "layout", "status", "exit_code", "reason", *METRICS, "folder"])
    for outcome in outcomes:
        values = assigned(outcome.overrides)
        numbers = [
            f"{outcome.numbers[name]:.9g}" if name in outcome.numbers else "" for name in METRICS
        ]
        code = "" if outcome.exit_code is None else outcome.exit_code
        swept = [values.get(key, "") for key in keys]
        rows.writerow(
            [
                outcome.number,
                *swept,
                outcome.layout,
                outcome.status,
                code,
                outcome.reason,
                *numbers,
                outcome.folder or "",
            ]
        )
    path = folder / SWEEP_FILE
    replace_text(path, text.getvalue())
    return path


def format_table(outcomes: Sequence[Outcome], keys: Sequence[str], width: int) -> str:
    """Write the jobs as lines of at most `width` characters; columns that do not fit are
    narrowed."""
    columns = [("job", [str(outcome.number) for outcome in outcomes])]
    columns += [
        (_short(key, keys), [assigned(outcome.overrides).get(key, "") for outcome in outcomes])
        for key in keys
    ]
    columns.append(("status", [outcome.status for outcome in outcomes]))
    for name, title, form in _SHOWN:
        cells = [
            form(outcome.numbers[name]) if name in outcome.numbers else "" for outcome in outcomes
        ]
        if any(cells):
            columns.append((title, cells))
    widths = _fitted(
        [max(len(title), *(len(cell) for cell in cells)) for title, cells in columns], width
    )
    lines = [[title for title, _ in columns], *zip(*(cells for _, cells in columns), strict=True)]
    text = [
        _GAP.join(_truncated(cell, size) for cell, size in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    rule = "-" * max(len(line) for line in text)
    return "\n".join([rule, text[0], rule, *text[1:], rule])


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_SHOWN = (
    ("loss", "loss", lambda value: f"{value:.5f}"),
    ("val_loss", "val loss", lambda value: f"{value:.5f}"),
    ("tokens_per_second", "tokens/s", lambda value: f"{value:,.0f}"),
    ("step_seconds", "s/step", lambda value: f"{value:.3f}"),
    ("bubble", "bubble", lambda value: f"{100 * value:.1f} %"),
    ("memory", "memory", show_memory),
    ("seconds", "time", _duration),
)


def _short(key: str, keys: Sequence[str]) -> str:
    """Shorten a key to its last part, if no other key ends in it."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def _fitted(widths: list[int], total: int) -> list[int]:
    """Narrow the widest column until all fit; no column becomes narrower than a few characters."""
    widths = list(widths)
    while sum(widths) + len(_GAP) * (len(widths) - 1) > total and max(widths) > _FEWEST_CHARACTERS:
        widths[widths.index(max(widths))] -= 1
    return widths


def _truncated(cell: str, size: int) -> str:
    return cell.ljust(size) if len(cell) <= size else cell[: size - 1] + "…"
