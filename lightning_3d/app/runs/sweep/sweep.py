"""Run the jobs of a sweep with an engine, skip those that an earlier start finished, and compare
them."""

from __future__ import annotations

import contextlib
import csv
import io
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from lightning_3d.app.runs.report.sweep import SWEEP_FILE, write_sweep_report
from lightning_3d.app.runs.status import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    RunStatus,
    read_status,
)
from lightning_3d.app.runs.sweep.folder import SweepFolder, is_finished, prepare
from lightning_3d.app.runs.sweep.jobs import Entry, SkippedJob, SweepJob
from lightning_3d.app.runs.sweep.local_engine import Began, Ended, Going, Interrupted, JobEngine
from lightning_3d.app.runs.sweep.results import (
    CHECKED,
    METRICS,
    NOT_STARTED,
    SKIPPED,
    JobOutcome,
    finished_before,
)
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.storage.json_file import replace_text
from lightning_3d.storage.numbers import show_memory


class Sweep:
    """All jobs of one command, in one or several batches.

    Args:
        folder: folder of the sweep, held by this process.
        engine: engine that starts the jobs.
        keys: keys that the command line sweeps; keys in which jobs differ are added.
        out: stream for progress and the table; None: the current standard output.

    Attributes:
        has_results: whether a job has given a sweeper a result.
    """

    def __init__(
        self,
        folder: SweepFolder,
        engine: JobEngine,
        *,
        keys: Sequence[str] = (),
        out: TextIO | None = None,
    ) -> None:
        self.folder = folder
        self.outcomes: dict[int, JobOutcome] = {}
        self.has_results = False
        self._engine = engine
        self._known = tuple(keys)
        self._out = out
        self._width = 0

    @property
    def exit_code(self) -> int:
        """Exit code of the sweep. 0: all valid jobs have finished; 1: some failed; 2: no job is
        valid."""
        statuses = {outcome.status for outcome in self.outcomes.values()}
        if statuses <= {SKIPPED}:
            return Lightning3DError.exit_code if statuses else 0
        return int(not statuses <= {FINISHED, SKIPPED, CHECKED})

    def run(self, entries: Sequence[Entry]) -> list[JobOutcome]:
        """Run a batch of jobs. Problems are reported before the first job starts; jobs that have
        finished do not run again.

        Raises:
            ConfigError: two jobs would share a folder, or a folder holds something other than this
                sweep.
            Interrupted: a signal arrived; the running jobs were stopped first.
        """
        try:
            jobs = self._plan(entries)
            self._show_plan(entries, jobs)
            self._save()
            self._run(jobs)
        except Interrupted:
            self._say("")
            self._stopped()
            raise
        finally:
            self._save()
        return [self.outcomes[entry.number] for entry in entries]

    def close(self) -> None:
        """Print the table, if there is something to compare, and release the folder. Later calls do
        nothing."""
        if self.folder.lock is None:
            return
        self.show_table()
        self.folder.close(used=self._used)

    @property
    def _used(self) -> bool:
        """True once there is a job to run."""
        return any(outcome.folder is not None for outcome in self.outcomes.values())

    def _plan(self, entries: Sequence[Entry]) -> list[SweepJob]:
        """Prepare the folders of the jobs, and return the jobs to run."""
        _require_own_folders(entries)
        outcomes = {entry.number: JobOutcome.of(entry) for entry in entries}
        jobs = []
        for job in (entry for entry in entries if isinstance(entry, SweepJob)):
            if is_finished(job):
                outcomes[job.number] = finished_before(job)
            else:
                jobs.append(job)
        self.outcomes |= outcomes
        return [job for job in jobs if self._prepare(job)]

    def _prepare(self, job: SweepJob) -> bool:
        try:
            moved = prepare(self.folder.path, job)
        except ConfigError as error:
            self.outcomes[job.number] = JobOutcome.of(
                SkippedJob(job.number, job.overrides, str(error))
            )
            return False
        if moved is not None:
            self._say(
                f"job {job.number} did not finish last time and restarts; its earlier output was"
                f" moved to {moved}"
            )
        return True

    def _run(self, jobs: Sequence[SweepJob]) -> None:
        begun = 0
        with contextlib.closing(self._engine.run(jobs)) as events:
            for event in events:
                job = event.job
                if isinstance(event, Began):
                    begun += 1
                    self.outcomes[job.number] = replace(self.outcomes[job.number], status=RUNNING)
                    self._save()
                    where = f" ({event.where})" if event.where else ""
                    self._say(
                        f"[{begun}/{len(jobs)}] job {job.number}:"
                        f" {self._describe(job.overrides)}{where}"
                    )
                elif isinstance(event, Going):
                    self._show_progress(job)
                else:
                    self._record(event)

    def _record(self, event: Ended) -> None:
        job = event.job
        outcome = self.outcomes[job.number].ended(event.exit_code, event.reason or "")
        self.outcomes[job.number] = outcome
        # a command that keeps no status
        if outcome.status == FINISHED and read_status(job.folder) is None:
            RunStatus.begun().after(0).write(job.folder)
        said = (
            f"exit code {event.exit_code}: {outcome.reason or 'no reason given'} (output:"
            f" {job.log})"
        )
        self._say(
            f"      job {job.number} {outcome.status},"
            f" {_numbers(outcome) if outcome.status == FINISHED else said}"
        )
        self._save()

    def _stopped(self) -> None:
        """Mark jobs as interrupted that have started and are not known to have ended."""
        for number, outcome in self.outcomes.items():
            if outcome.status == RUNNING and outcome.folder is not None:
                status = read_status(outcome.folder)
                code = status.exit_code if status is not None else None
                self.outcomes[number] = replace(outcome.ended(130), exit_code=code)

    def _save(self) -> None:
        """Write `sweep.csv` and `sweep.html`, once there is a job to run."""
        outcomes = self._sorted()
        if self._used:
            write_csv(self.folder.path, outcomes, swept_keys(outcomes, self._known))
            write_sweep_report(self.folder.path)

    def _sorted(self) -> list[JobOutcome]:
        return [self.outcomes[number] for number in sorted(self.outcomes)]

    def _show_plan(self, entries: Sequence[Entry], jobs: Sequence[SweepJob]) -> None:
        batch = [self.outcomes[entry.number] for entry in entries]
        counts = {
            "to run": len(jobs),
            "already finished": sum(outcome.before for outcome in batch),
            "checked only": sum(outcome.status == CHECKED for outcome in batch),
            "skipped": sum(outcome.status == SKIPPED for outcome in batch),
        }
        words = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        plural = "s" * (len(batch) != 1)
        self._say(
            f"sweep of {len(batch)} job{plural}"
            + (f" in {self.folder.path}" if jobs else "")
            + f": {words}"
        )
        for outcome in batch:
            what = self._describe(outcome.overrides)
            if outcome.status in (SKIPPED, CHECKED):
                self._say(f"      job {outcome.number} {outcome.status}: {what}: {outcome.reason}")
            elif outcome.before:
                self._say(
                    f"      job {outcome.number} ({what}) had already finished: {_numbers(outcome)}"
                )

    def _describe(self, overrides: Sequence[str]) -> str:
        """Name a job by the keys in which it differs from the others."""
        keys = swept_keys(self._sorted(), self._known)
        values = assigned(overrides)
        return (
            " ".join(f"{key}={values[key]}" for key in keys if key in values)
            or " ".join(overrides)
            or "no overrides"
        )

    def _show_progress(self, job: SweepJob) -> None:
        """On a terminal, show the job's last line, overwriting the previous one."""
        out = self._out or sys.stdout
        if not out.isatty() or not job.log.is_file():
            return
        with job.log.open("rb") as log:
            log.seek(max(0, job.log.stat().st_size - 1000))
            lines = log.read().decode(errors="replace").split("\n")
        last = next((line.split("\r")[-1].strip() for line in reversed(lines) if line.strip()), "")
        line = f"      job {job.number} | {last}"[: shutil.get_terminal_size().columns - 1]
        out.write("\r" + line.ljust(self._width))
        out.flush()
        self._width = len(line)

    def show_table(self) -> None:
        """Print and write the comparison, if there is something to compare."""
        if not self._used:
            return
        outcomes = self._sorted()
        keys = swept_keys(outcomes, self._known)
        out = self._out or sys.stdout
        # a file has no width
        width = shutil.get_terminal_size((120, 24)).columns if out.isatty() else sys.maxsize
        self._say("\n" + format_table(outcomes, keys, width))
        for outcome in outcomes:
            if outcome.status in (SKIPPED, FAILED):
                self._say(
                    f"job {outcome.number} {outcome.status}:"
                    f" {outcome.reason or f'exit code {outcome.exit_code}'}"
                )
        self._say(f"table: {write_csv(self.folder.path, outcomes, keys)}")
        self._say(f"report: {write_sweep_report(self.folder.path)}")
        if any(outcome.status in (FAILED, INTERRUPTED, NOT_STARTED) for outcome in outcomes):
            self._say(
                "to run the jobs that did not finish, repeat the command with"
                f" hydra.sweep.dir={self.folder.path}"
            )

    def _say(self, text: str) -> None:
        out = self._out or sys.stdout
        if self._width:  # leave the line that is being rewritten
            out.write("\r" + " " * self._width + "\r")
            self._width = 0
        print(text, file=out, flush=True)


def _numbers(outcome: JobOutcome) -> str:
    missing = (
        "no numbers: it wrote no metrics.csv (add the callback"
        " lightning_3d.app.training.callbacks.MetricsCSV)"
    )
    names = {
        "loss": "loss {:.4f}",
        "val_loss": "validation loss {:.4f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "seconds": "{:.0f} s",
    }
    return (
        ", ".join(
            text.format(outcome.numbers[name])
            for name, text in names.items()
            if name in outcome.numbers
        )
        or missing
    )


def _require_own_folders(entries: Sequence[Entry]) -> None:
    """Raise ConfigError if two jobs would write into one folder."""
    taken: dict[Path, int] = {}
    for job in (entry for entry in entries if isinstance(entry, SweepJob)):
        other = taken.setdefault(job.folder, job.number)
        if other != job.number:
            raise ConfigError(
                f"Jobs {other} and {job.number} would both write into {job.folder}. Set"
                " hydra.sweep.subdir to a name that differs between jobs, for example"
                " ${hydra:job.num}."
            )


# The comparison at the end of a sweep: `sweep.csv`, and a plain table that fits the terminal.

_FEWEST_CHARACTERS = 6
_GAP = "  "


def assigned(overrides: Iterable[str]) -> dict[str, str]:
    """Split overrides into keys and values: `+a.b=1` is `a.b` and `1`."""
    pairs = (override.partition("=") for override in overrides)
    return {key.lstrip("+~"): value for key, _, value in pairs}


def swept_keys(outcomes: Sequence[JobOutcome], known: Iterable[str] = ()) -> list[str]:
    """List the keys that the command line sweeps or in which jobs differ, in the order of the
    command line."""
    jobs = [assigned(outcome.overrides) for outcome in outcomes]
    keys = list(dict.fromkeys(key for job in jobs for key in job))
    return [key for key in keys if key in known or len({job.get(key) for job in jobs}) > 1]


def write_csv(folder: Path, outcomes: Sequence[JobOutcome], keys: Sequence[str]) -> Path:
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


def format_table(outcomes: Sequence[JobOutcome], keys: Sequence[str], width: int) -> str:
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
