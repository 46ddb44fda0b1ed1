"""The folder of a sweep, which belongs to one process at a time, and the folders of its jobs, which
later starts reuse."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.app.runs.folder import (
    CONFIG_FILE,
    candidates,
    holder_of,
    in_progress,
    missing_folders,
)
from lightning_3d.app.runs.frozen_config import frozen_text, move_to
from lightning_3d.app.runs.resumed_keys import describe, differences, refused_changes
from lightning_3d.app.runs.status import FINISHED, RUNNING, read_status
from lightning_3d.app.runs.sweep.jobs import LOG_FILE, SweepJob
from lightning_3d.errors import ConfigError
from lightning_3d.storage.holder import LockHolder
from lightning_3d.storage.lock import FileLock

LOCK_FILE = ".sweep_lock"
EARLIER = "earlier"
"""Folder in the sweep's folder for the earlier files of jobs that did not finish and restart."""

_LEFT_BY_PREPARATION = {CONFIG_FILE, LOG_FILE, ".hydra"}


@dataclass
class SweepFolder:
    """A folder that belongs to the sweep of this process.

    Attributes:
        path: absolute.
        created: folders that were created for it, outermost first.
        before: names that were in it before.
        lock: lock of the folder; None after `close`.
    """

    path: Path
    created: tuple[Path, ...]
    before: frozenset[str]
    lock: FileLock | None

    @classmethod
    def take(cls, path: Path, *, numbered: bool) -> SweepFolder:
        """Claim a folder for this sweep while this process lives. The folder may hold an earlier
        start of the same sweep.

        Args:
            path: the folder.
            numbered: if another sweep uses it, take the first of path_1, path_2, ... that is free.

        Raises:
            ConfigError: another sweep uses it, or it cannot be written.
        """
        path = path.absolute()
        for place in candidates(path, numbered=numbered):
            try:
                return cls._take(place)
            except BlockingIOError:
                continue
            except OSError as error:
                said = (
                    f"Cannot use the sweep folder {place}: {error.strerror}. Set hydra.sweep.dir to"
                    " another folder."
                )
                raise ConfigError(said) from error
        other, holder = "set hydra.sweep.dir to another folder", LockHolder.read(path / LOCK_FILE)
        if holder is None:
            raise ConfigError(
                f"Another sweep is in progress in {path}. Wait until it ends, or {other}."
            )
        raise ConfigError(
            f"Another sweep is in progress in {path} ({holder.describe()})."
            f" {holder.what_to_do(other)}"
        )

    @classmethod
    def _take(cls, path: Path) -> SweepFolder:
        created = missing_folders(path)
        path.mkdir(parents=True, exist_ok=True)
        before = frozenset(entry.name for entry in path.iterdir())
        lock = FileLock(path / LOCK_FILE)
        if not lock.acquire():
            raise BlockingIOError
        return cls(path, created, before, lock)

    def close(self, *, used: bool) -> None:
        """Release the folder. If no job was to run, restore what was there before."""
        if self.lock is None:
            return
        if not used:
            for entry in self.path.iterdir():
                if entry.name not in self.before:
                    (
                        shutil.rmtree(entry, ignore_errors=True)
                        if entry.is_dir()
                        else entry.unlink(missing_ok=True)
                    )
            for folder in reversed(self.created):
                try:
                    folder.rmdir()
                except OSError:  # something else is in it
                    break
        self.lock.release()
        self.lock = None


def is_finished(job: SweepJob) -> bool:
    """Check whether an earlier start of the sweep finished this very job.

    Raises:
        ConfigError: the folder holds a finished run of another configuration, or a run that is in
            progress.
    """
    status = read_status(job.folder)
    if status is None:
        return False
    if status.status == RUNNING and in_progress(job.folder):
        holder = holder_of(job.folder)
        who = (
            f" ({holder.describe()}). {holder.what_to_do('set hydra.sweep.dir to another folder')}"
            if holder is not None
            else "."
        )
        raise ConfigError(f"{job.folder} belongs to a run that is in progress{who}")
    if status.status != FINISHED:
        return False
    changes = list(differences(_moved(_config_in(job.folder), job.folder), _as_read(job.config)))
    if not changes:
        return True
    raise ConfigError(
        f"{job.folder} holds a finished run with another configuration: now {describe(changes)}."
        " Set hydra.sweep.dir to a new folder, or repeat the command line of the earlier sweep."
    )


def prepare(sweep: Path, job: SweepJob) -> Path | None:
    """Prepare the folder of a job: it then holds the configuration and nothing of an earlier run.

    The files of an earlier run that did not finish are moved to `earlier/` in the sweep's folder,
    unless the job resumes that run (`trainer.auto_resume`).

    Returns:
        The place to which they were moved; None if there were none.

    Raises:
        ConfigError: the folder cannot be created.
    """
    try:
        moved = None if _resumes(job) else _put_aside(sweep, job.folder)
        job.folder.mkdir(parents=True, exist_ok=True)
        for name, text in job.hydra_files.items():
            (job.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (job.folder / name).write_text(text, encoding="utf-8")
        (job.folder / CONFIG_FILE).write_text(frozen_text(job.config), encoding="utf-8")
    except OSError as error:
        said = (
            f"Cannot create the run folder {job.folder}: {error.strerror}. Set hydra.sweep.subdir"
            " to another name."
        )
        raise ConfigError(said) from error
    return moved


def _resumes(job: SweepJob) -> bool:
    """Check whether the job would resume an earlier attempt in its folder."""
    trainer, old = job.config.get("trainer"), _config_in(job.folder)
    if not (isinstance(trainer, dict) and trainer.get("auto_resume") and isinstance(old, dict)):
        return False
    return not refused_changes(old, _as_read(job.config))


def _put_aside(sweep: Path, folder: Path) -> Path | None:
    if not folder.exists() or {entry.name for entry in folder.iterdir()} <= _LEFT_BY_PREPARATION - {
        LOG_FILE
    }:
        return None
    name = folder.name
    place = sweep / EARLIER / name
    number = 0
    while place.exists():
        number += 1
        place = sweep / EARLIER / f"{name}_{number}"
    place.parent.mkdir(parents=True, exist_ok=True)
    os.rename(folder, place)
    return place


def _config_in(folder: Path) -> Any:
    try:
        return yaml.safe_load((folder / CONFIG_FILE).read_text("utf-8"))
    except (OSError, yaml.YAMLError):
        return None


def _as_read(config: dict[str, Any]) -> Any:
    return yaml.safe_load(frozen_text(config))


def _moved(config: Any, folder: Path) -> Any:
    """Return the configuration as it would be in a folder: the folder of the sweep may have been
    moved since."""
    return (
        move_to(config, folder) if isinstance(config, dict) and config.get("run_folder") else config
    )
