"""What a sweep consists of: jobs that can run, and entries that cannot or need not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG_FILE = "job.log"


@dataclass(frozen=True, eq=False)
class Job:
    """A run that an engine can start: a folder with a frozen configuration, and the command that trains from it.

    Attributes:
        number: of the job in its sweep, from 0.
        overrides: of the command line, for this job.
        folder: absolute; of this run alone. `config.yaml` is there before the job is started.
        config: what is in that file.
        command: starts the run, in a fresh process, and ends when it has ended, with its exit code.
        ranks: processes that train.
        environment: variables to set for it, beside those of the sweep's own process.
        work_folder: where to start it; None is the sweep's own.
        hydra_files: texts that Hydra leaves in a run folder, by their path in it.
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
        """What the job prints."""
        return self.folder / LOG_FILE


@dataclass(frozen=True)
class Skipped:
    """A job that cannot run, and why."""

    number: int
    overrides: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Checked:
    """A job that was only to be checked (`trainer.dry`), and what it would be."""

    number: int
    overrides: tuple[str, ...]
    description: str


Entry = Job | Skipped | Checked
