"""Entries of a sweep: jobs that can run, and jobs that cannot or need not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_FILE = "job.log"


@dataclass(frozen=True, eq=False)
class SweepJob:
    """A run that an engine can start: a folder with a frozen configuration, and the command that
    trains from it.

    Attributes:
        number: number of the job in its sweep, from 0.
        overrides: overrides of the command line for this job.
        folder: absolute folder of this run alone. `config.yaml` is there before the job starts.
        config: contents of that file.
        command: command that runs the job in a fresh process and exits with its exit code.
        ranks: number of processes that train.
        environment: environment variables in addition to those of the sweep's process.
        work_folder: working directory; None: the sweep's.
        hydra_files: contents of the files that Hydra leaves in a run folder, by their path in it.
    """

    number: int
    overrides: tuple[str, ...]
    folder: Path
    config: dict[str, Any]
    command: tuple[str, ...]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    work_folder: Path | None = None
    hydra_files: Mapping[str, str] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        """File with the output of the job."""
        return self.folder / LOG_FILE


@dataclass(frozen=True)
class SkippedJob:
    """A job that cannot run, and the reason."""

    number: int
    overrides: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Checked:
    """A job that was only checked (`trainer.dry`), and the description of its run."""

    number: int
    overrides: tuple[str, ...]
    description: str


Entry = SweepJob | SkippedJob | Checked
