"""`lightning-3d plan --evaluate FILE.csv`: predictions beside what was measured. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.planner.measured import Run, read_runs
from lightning_3d.planner.memory import memory_of
from lightning_3d.planner.step import step_of

_GIGA = 2**30
"""Measured runs print memory in GiB."""

Table = list[list[str]]

_TITLE = """\
# How good the planner's predictions are

Written by `lightning-3d plan --evaluate FILE.csv`, which compares what it predicts with measured runs. The first part is with the constants
of `lightning_3d/planner/constants.py`; with `--folds N` there is a second one, whose constants have not seen the cells that they predict.

"""

_TIME, _MEMORY = ("step time: rows", "median", "mean", "p90", "under"), ("memory: rows", "median", "mean", "p90", "p95", "under")
_HEAD = ("source", "GPU", "rows", *_TIME, *_MEMORY)


@dataclass(frozen=True)
class Comparison:
    """A run and what is predicted for it: seconds of a step, bytes, and bytes if nothing had to be given back."""

    run: Run
    seconds: float
    memory: float
    roomy: float

    @property
    def time_error(self) -> float | None:
        """(predicted - measured) / measured seconds of a step; None where none are measured."""
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.run.memory is None else self.memory / _GIGA / self.run.memory - 1

    @property
    def measured_rate(self) -> float | None:
        """Tokens a second of one GPU."""
        return None if self.run.seconds is None else _rate(self.run, self.run.seconds)

    @property
    def predicted_rate(self) -> float:
        return _rate(self.run, self.seconds)


def _rate(run: Run, seconds: float) -> float:
    return run.job.global_batch * run.job.seq / seconds / run.job.layout.world_size


def compare(run: Run) -> Comparison:
    """Predict a measured run."""
    step = step_of(run.job, run.machine)
    queue = step.queue(run.job.stack)
    return Comparison(run, step.seconds, memory_of(run.job, queue=queue, room=run.room).total, memory_of(run.job, queue=queue).total)


def quantile(values: Iterable[float], share: float) -> float:
    """The value that `share` of the absolute values do not exceed, between neighbours by a straight line."""
    ordered = sorted(abs(value) for value in values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def choices(compared: Sequence[Comparison]) -> list[tuple[str, str, int, int, int, float]]:
    """For every cell with several timed layouts: (software, model, tokens of a sequence, GPUs, layouts, score). The score is measured
    tokens/s of the layout that is predicted to fit and to be fastest, divided by the most tokens/s that were measured."""
    cells: dict[tuple[str, str, int, int], list[Comparison]] = {}
    for one in compared:
        if one.measured_rate is not None:
            job = one.run.job
            cells.setdefault((job.stack.name, one.run.model, job.seq, job.layout.world_size), []).append(one)
    found = []
    for cell, members in sorted(cells.items()):
        if len(members) > 1:
            fitting = [one for one in members if one.roomy <= one.run.machine.memory] or members
            chosen = max(fitting, key=lambda one: one.predicted_rate)
            best = max(one.measured_rate or 0.0 for one in members)
            found.append((*cell, len(members), (chosen.measured_rate or 0.0) / best))
    return found


def evaluate(path: Path, folds: int = 0) -> str:
    """The report on a file, as Markdown: with the constants as they are, and with `folds` > 1 with constants that were calibrated
    without the cells that they predict.

    Raises:
        ConfigError: the file is missing, or has no columns of measured runs; fewer cells than folds.
    """
    from lightning_3d.planner.calibrate import cross_validate

    runs, skipped = read_runs(path)
    compared = [compare(run) for run in runs]
    counted = f"{len(runs)} runs are predicted; {skipped} are not, because their layout or type of GPU is not stated."
    text = f"{_TITLE}{counted}\n\n{report(compared)}"
    if folds:
        held = cross_validate(runs, folds, compare)
        text += f"\n# With constants calibrated without the cells that they predict, {folds} parts\n\n{report(held)}"
    return text


def report(compared: Sequence[Comparison]) -> str:
    """Tables of errors by source and type of GPU, of choices by cell."""
    lines = [
        "## Errors",
        "",
        "|predicted - measured| / measured; `under`: share of rows that are predicted too small.",
        "",
        *table(_HEAD, _errors(compared)),
        "",
        "`core`: rows with tp <= 8 and a stated MFU of at least 20 %.",
        "",
        "## Choices",
        "",
        "In each cell, a model, a length of sequences and a number of GPUs: measured tokens/s of the layout that is predicted to fit and"
        " to be fastest, divided by the best measured.",
        "",
    ]
    found = choices(compared)
    for software in dict.fromkeys(cell[0] for cell in found):
        cells = [cell for cell in found if cell[0] == software]
        scores = [cell[-1] for cell in cells]
        lines += [f"{software}: median {quantile(scores, 0.5):.3f}, worst {min(scores):.3f}, {len(cells)} cells", ""]
        rows = [[model, str(seq), str(gpus), str(count), f"{score:.3f}"] for _, model, seq, gpus, count, score in cells]
        lines += [*table(["model", "tokens", "GPUs", "layouts", "score"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def table(head: Sequence[str], rows: Table) -> list[str]:
    """Lines of a Markdown table whose columns are aligned."""
    cells = [list(head), *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _errors(compared: Sequence[Comparison]) -> Table:
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for one in compared:
        groups.setdefault((short(one.run.source), one.run.gpu), []).append(one)
        if one.run.core and one.run.mfu is not None:
            groups.setdefault((short(one.run.source) + ", core", one.run.gpu), []).append(one)
    return [_row(source, gpu, members) for (source, gpu), members in groups.items()]


def short(source: str) -> str:
    """A source without what stands in brackets."""
    return source.partition(" (")[0]


def _row(source: str, gpu: str, members: Sequence[Comparison]) -> list[str]:
    time = [one.time_error for one in members if one.time_error is not None]
    memory = [one.memory_error for one in members if one.memory_error is not None]
    return [source, gpu, str(len(members)), *_summary(time, (0.9,)), *_summary(memory, (0.9, 0.95))]


def _summary(errors: Sequence[float], shares: Sequence[float]) -> list[str]:
    if not errors:
        return ["0"] + ["-"] * (3 + len(shares))
    mean = sum(map(abs, errors)) / len(errors)
    values = [quantile(errors, 0.5), mean, *(quantile(errors, share) for share in shares), sum(error < 0 for error in errors) / len(errors)]
    return [str(len(errors)), *(f"{value:.1%}" for value in values)]
