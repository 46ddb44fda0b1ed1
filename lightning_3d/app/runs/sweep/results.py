"""Outcome of a job, read from its folder. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_3d.app.runs.metrics_file import column, read_rows
from lightning_3d.app.runs.status import FAILED, FINISHED, INTERRUPTED, read_status
from lightning_3d.app.runs.sweep.jobs import Checked, Entry, SkippedJob, SweepJob
from lightning_3d.errors import ConfigError, did_you_mean, listed

SKIPPED = "skipped"
CHECKED = "checked"
NOT_STARTED = "not started"

FINAL = ("loss", "val_loss", "grad_norm")
TYPICAL = ("tokens_per_second", "step_seconds", "bubble")
LARGEST = ("memory",)
METRICS = (*FINAL, *TYPICAL, *LARGEST, "seconds")

_LOG_TAIL_BYTES = 64_000
_OURS = "lightning_3d: "
_NOT_WHY = (
    "the run failed",
    "the output of the ranks",
    "what the ranks printed",
    "This machine has",
    "A step has",
)
_WARNINGS = tuple(_OURS + words for words in _NOT_WHY)
_AFTER_THE_REASON = (
    "Set the environment variable HYDRA_FULL_ERROR",
    "    full_key: ",
    "    object_type=",
    "    reference_type=",
)
"""Lines that Hydra and OmegaConf print after the error of a user's own application."""


@dataclass(frozen=True)
class JobOutcome:
    """One row of the table.

    Attributes:
        number: number of the job.
        overrides: overrides of the job.
        status: skipped, checked, not started, running, or how it ended.
        exit_code: exit code; None if there is none.
        reason: why it was skipped or failed; of a checked job, its description.
        numbers: numbers by name of `METRICS`, without those that do not exist. Losses are from the
            last step that has them. Speeds are medians over all steps but the first; the bubble is
            the median over traced steps, memory their maximum. `seconds` is the time from the start
            of the run to its end.
        folder: run folder; None for jobs without one.
        before: whether an earlier start of the same sweep finished it.
        layout: name of the layout, if the configuration has one.
    """

    number: int
    overrides: tuple[str, ...]
    status: str
    exit_code: int | None = None
    reason: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    folder: Path | None = None
    before: bool = False
    layout: str = ""

    @classmethod
    def of(cls, entry: Entry) -> JobOutcome:
        """Return the outcome of an entry that has not run."""
        if isinstance(entry, SkippedJob):
            return cls(entry.number, entry.overrides, SKIPPED, 2, entry.reason)
        if isinstance(entry, Checked):
            return cls(entry.number, entry.overrides, CHECKED, 0, entry.description)
        group = entry.config.get("parallelism")
        layout = group.get("layout") if isinstance(group, dict) else None
        return cls(
            entry.number,
            entry.overrides,
            NOT_STARTED,
            folder=entry.folder,
            layout=str(layout or ""),
        )

    def ended(self, exit_code: int, reason: str = "") -> JobOutcome:
        """Return the outcome of the same job after its end, with the numbers in its folder."""
        assert self.folder is not None
        status = (
            FINISHED if exit_code == 0 else INTERRUPTED if exit_code in (130, 143, 129) else FAILED
        )
        if status == FAILED and not reason:
            reason = _reason_in_status(self.folder, exit_code) or reason_in_log(
                self.folder / "job.log"
            )
        return replace(
            self,
            status=status,
            exit_code=exit_code,
            reason=reason,
            numbers=read_numbers(self.folder),
        )

    def objective(self, metric: str | None) -> float | None:
        """Return the number that a sweeper optimizes; without a name the validation loss, or the
        training loss without validation."""
        if metric is None:
            return self.numbers.get("val_loss", self.numbers.get("loss"))
        return self.numbers.get(metric)


def finished_before(job: SweepJob) -> JobOutcome:
    """Return the outcome of a job that an earlier start of the sweep finished."""
    return replace(JobOutcome.of(job).ended(0), before=True)


def check_metric(name: str) -> None:
    """Raise ConfigError for a metric that no job has."""
    if name not in METRICS:
        names, near = listed(METRICS, last="or"), did_you_mean(str(name), METRICS)
        raise ConfigError(f'hydra.launcher.metric must be {names}; got "{name}".{near}')


def read_numbers(folder: Path) -> dict[str, float]:
    """Read the numbers of a run from its `metrics.csv`, and its duration."""
    rows = read_rows(folder / "metrics.csv")
    numbers = {}
    for name in FINAL:
        values = column(rows, name)
        if values:
            numbers[name] = values[-1]
    for name in TYPICAL:
        values = column(rows[1:] or rows, name)  # the first step also warms up
        if values:
            numbers[name] = statistics.median(values)
    for name in LARGEST:
        values = column(rows, name)
        if values:
            numbers[name] = max(values)
    status = read_status(folder)
    if status is not None and status.seconds is not None:
        numbers["seconds"] = status.seconds
    return numbers


def _reason_in_status(folder: Path, exit_code: int) -> str:
    """Return the reason that a run recorded when it ended, in one line; empty if it recorded
    none."""
    status = read_status(folder)
    if status is None or status.exit_code != exit_code:
        return ""
    return _reason_in(status.reason.splitlines())


def reason_in_log(log: Path) -> str:
    """Find in a job's output why it ended, in one line."""
    if not log.is_file():
        return ""
    return _reason_in(log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").splitlines())


def _reason_in(lines: Sequence[str]) -> str:
    """Find our last message, with the error that follows it."""
    ends = [number for number, line in enumerate(lines) if line.startswith(_OURS)]
    starts = [number for number in ends if not lines[number].startswith(_WARNINGS)]
    if not starts:
        return next(
            (
                line.strip()
                for line in reversed(lines)
                if line.strip() and not line.startswith(_AFTER_THE_REASON)
            ),
            "",
        )
    first = starts[-1]
    following = [number for number in ends if number > first]
    said = [
        line.strip()
        for line in lines[first : following[0] if following else len(lines)]
        if line.strip()
    ]
    message = said[0].removeprefix(_OURS)
    return f"{message} {said[-1]}" if message.endswith(":") and len(said) > 1 else message
