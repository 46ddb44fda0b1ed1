"""Folder of a run: it holds the files of one run, and nothing of a run that was refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_3d.app.runs.checkpoints import newest_checkpoint
from lightning_3d.app.runs.restarts import MOST_WITHOUT_PROGRESS, RESTARTS_FILE, note_restart
from lightning_3d.app.runs.resumed_keys import describe, refused_changes
from lightning_3d.app.runs.status import RUNNING, STATUS_FILE, RunStatus, read_status
from lightning_3d.errors import ConfigError
from lightning_3d.storage.checkpoint_names import steps_of
from lightning_3d.storage.holder import LockHolder, moment
from lightning_3d.storage.json_file import replace_text
from lightning_3d.storage.lock import is_held, keep
from lightning_3d.storage.remote_path import place

CONFIG_FILE = "config.yaml"
LOGS = "logs"
WANDB_FILE = "wandb_run.json"
"""File with the id, name, group, project and url of the run at Weights & Biases."""
_LOCK, _PROBE, _HYDRA = ".lock", ".room", ".hydra"
EARLIER_SECONDS = 10.0
"""Time for an earlier attempt of a run to end, when the run is started again."""

_POLL_SECONDS = 0.2
_START_BYTES = 2**18
"""Room for the configuration, Hydra's files, the log, the status, the first rows of metrics and the
report."""


@dataclass(frozen=True)
class RunFolder:
    """A folder that belongs to this run.

    Attributes:
        path: absolute.
        created: folders that were created for it, outermost first; `path` is one of them unless it
            existed.
        before: names that were in it before this run.
        resume: checkpoint of an earlier attempt of this run, to resume; None if there is none.
        earlier: files of an earlier attempt that this one writes again, by name.
        results: number of recorded steps, and newest checkpoint, of earlier attempts.
    """

    path: Path
    created: tuple[Path, ...]
    before: frozenset[str]
    resume: str | None = None
    earlier: Mapping[str, bytes] = field(default_factory=dict)
    results: tuple[int, str | None] = (0, None)

    @classmethod
    def claim(cls, path: Path, *, numbered: bool, option: str = "hydra.run.dir") -> RunFolder:
        """Claim a folder for this run. If several processes try at once, one succeeds.

        Args:
            path: the folder.
            numbered: if another run has it, take the first of path_1, path_2, ... that is free.
            option: option that names another folder, for messages.

        Raises:
            ConfigError: another run has it, or it cannot be created.
        """
        path = path.absolute()
        for candidate in candidates(path, numbered=numbered):
            try:
                return cls._claim(candidate)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"Cannot create the run folder {candidate}: {error.strerror}. Set {option} to"
                    " another folder."
                ) from error
        raise ConfigError(_taken(path, option))

    @classmethod
    def _claim(cls, path: Path) -> RunFolder:
        created = missing_folders(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            before = frozenset(entry.name for entry in path.iterdir())
            (path / CONFIG_FILE).touch(exist_ok=False)
        except FileExistsError:
            raise
        except OSError:
            _remove_empty(created)
            raise
        folder = cls(path, created, before)
        try:
            _hold(path)
            require_room(path)
        except (OSError, ConfigError):
            folder.discard()
            raise
        return folder

    @classmethod
    def take(
        cls,
        path: Path,
        config: Mapping[str, Any],
        claim: Callable[[], RunFolder],
        earlier: Path | None = None,
    ) -> RunFolder:
        """Take the folder of an earlier attempt of this run if there is one, or else a new one.

        Args:
            path: the folder.
            config: the configuration; with `trainer.auto_resume`, and in a job that SLURM
                restarted, `path` holds an earlier attempt.
            claim: takes a new folder.
            earlier: folder of the previous attempt, if the launcher remembers it.
        """
        again = (
            config["trainer"].get("auto_resume")
            or int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        )
        if again and (path / CONFIG_FILE).exists():
            earlier = path
        # an attempt that was refused leaves no folder
        if earlier is None or not (earlier / CONFIG_FILE).exists():
            return claim()
        return cls.reopen(earlier, config)

    @classmethod
    def reopen(cls, path: Path, config: Mapping[str, Any]) -> RunFolder:
        """Take the folder of an earlier attempt of this run, which trained until something ended
        it.

        Args:
            config: the groups that `refused_changes` compares, resolved; and `trainer`, for the
                number of restarts.

        Raises:
            ConfigError: it belongs to another run, the earlier attempt has not ended, or the run
                has failed too often in a row.
        """
        path = path.absolute()
        try:
            earlier = yaml.safe_load((path / CONFIG_FILE).read_text("utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(
                f"Cannot read the configuration in the run folder {path}:"
                f" {' '.join(str(error).split())}."
            ) from error
        differ = refused_changes(earlier, config)
        if differ:
            raise ConfigError(
                f"{path} holds a run that cannot be resumed with {describe(differ)}. Leave these"
                " keys as they were, or set hydra.run.dir to a new folder."
            )
        _hold(path, EARLIER_SECONDS)
        try:
            require_room(path)
        except OSError as error:
            raise ConfigError(
                f"Cannot write to the run folder {path}: {error.strerror}."
            ) from error
        files = [
            path / CONFIG_FILE,
            path / STATUS_FILE,
            path / RESTARTS_FILE,
            *(path / _HYDRA).glob("*"),
        ]
        kept = {str(file.relative_to(path)): file.read_bytes() for file in files if file.is_file()}
        before = frozenset(entry.name for entry in path.iterdir())
        newest = restart_from(path, config.get("trainer", {}))
        return cls(path, (), before, newest, kept, (_recorded_steps(path), newest))

    @classmethod
    def adopt(cls, path: Path) -> RunFolder:
        """Take a folder that was prepared for this run and holds only the configuration. If several
        processes try, one succeeds.

        Raises:
            ConfigError: a run took it before, or it cannot be written.
        """
        path = path.absolute()
        folder = cls(path, (), frozenset(entry.name for entry in path.iterdir()))
        try:
            if folder.holds_results():
                raise FileExistsError
            require_room(path)
            RunStatus.begun().write(path, first=True)
            _hold(path)
        except FileExistsError:
            status = read_status(path)  # another process may have taken it a moment ago
            holder = holder_of(path) if status is not None and status.status == RUNNING else None
            who = f"; {holder.describe()}" if holder is not None else ""
            how = f" (status: {status.status}{who})" if status is not None else ""
            raise ConfigError(
                f"{path} already holds a run{how}. To repeat it in a new folder, use --folder NEW."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"Cannot write to the run folder {path}: {error.strerror}."
            ) from error
        return folder

    def write_config(self, text: str) -> None:
        """Write the resolved configuration."""
        replace_text(self.path / CONFIG_FILE, text)

    def holds_results(self) -> bool:
        """Check whether training of this attempt left anything worth keeping: a step or a
        checkpoint."""
        return (_recorded_steps(self.path), newest_checkpoint(self.path)) != self.results

    def discard(self) -> None:
        """Remove everything that this attempt put there, and restore what it replaced."""
        for entry in self.path.iterdir():
            if entry.name not in self.before:
                (
                    shutil.rmtree(entry, ignore_errors=True)
                    if entry.is_dir()
                    else entry.unlink(missing_ok=True)
                )
        for name, content in self.earlier.items():
            replace_text(self.path / name, content.decode("utf-8", "surrogateescape"))
        _remove_empty(self.created)


def _recorded_steps(path: Path) -> int:
    metrics = path / "metrics.csv"
    return max(0, len(metrics.read_text("utf-8").splitlines()) - 1) if metrics.is_file() else 0


def require_room(path: Path) -> None:
    """Raise OSError if a folder has no room for the small files that a run writes before its first
    step."""
    probe = path / _PROBE
    try:
        with probe.open("wb") as file:
            # a file system that compresses would find room for zeros
            file.write(os.urandom(_START_BYTES))
            os.fsync(file.fileno())
    finally:
        probe.unlink(missing_ok=True)


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove nested folders from the innermost outwards, until one holds something else."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:  # another run is in it
            return


def candidates(path: Path, *, numbered: bool) -> Iterator[Path]:
    """Yield `path` and, if `numbered`, path_1, path_2, ..."""
    yield path
    for number in range(1, 1000 if numbered else 1):
        yield path.with_name(f"{path.name}_{number}")


def missing_folders(path: Path) -> tuple[Path, ...]:
    """List the folders that must be created for `path`, outermost first."""
    return tuple(folder for folder in (*reversed(path.parents), path) if not folder.exists())


def restart_from(path: Path, trainer: Mapping[str, Any]) -> str | None:
    """Note a restart of a run in its folder, and return the checkpoint to resume; None if there is
    none.

    Args:
        path: the run folder.
        trainer: group `trainer` of the configuration.

    Raises:
        ConfigError: it has failed too often in a row.
    """
    newest = newest_checkpoint(path)
    most = trainer.get("restarts_without_progress", MOST_WITHOUT_PROGRESS)
    note_restart(path, steps_of(place(newest)) if newest is not None else 0, most)
    return newest


def read_wandb_file(path: Path) -> dict[str, str | None]:
    """Read the names of a run at Weights & Biases; empty if it has none."""
    try:
        names = json.loads((path / WANDB_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return names if isinstance(names, dict) else {}


def _hold(path: Path, patience: float = 0.0) -> None:
    """Let no other process take this folder while this process lives.

    Args:
        patience: seconds to wait for another process that holds it.

    Raises:
        ConfigError: another process holds it, or it cannot be written.
    """
    deadline, announced = time.monotonic() + patience, False
    try:
        while not (held := keep(path / _LOCK)) and time.monotonic() < deadline:
            holder = holder_of(path)
            if not announced and holder is not None:
                print(
                    f"lightning_3d: waiting up to {patience:.0f} s for {holder.describe()}, which"
                    f" still holds {path}",
                    file=sys.stderr,
                )
            announced = True
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise ConfigError(f"Cannot write to the run folder {path}: {error.strerror}.") from error
    if not held:
        raise ConfigError(_in_progress(path, holder_of(path), "set another folder"))


def holder_of(path: Path) -> LockHolder | None:
    """Return the process that works, or worked last, in a run folder; None if it is not known."""
    holder, status = LockHolder.read(path / _LOCK), read_status(path)
    return holder or (
        LockHolder(status.pid, status.host, since=status.started) if status is not None else None
    )


def in_progress(path: Path) -> bool | None:
    """Check whether a run is in progress in a folder; None if this host cannot see it."""
    holder, status = holder_of(path), read_status(path)
    said = status is None or status.status == RUNNING
    if holder is None:
        return False
    # which keeps the lock when its run has ended
    if holder.is_here and holder.process == os.getpid():
        return said
    held = is_held(path / _LOCK)
    if held:
        return True
    if not said or (held is False and holder.is_here):
        return False
    return holder.exists if holder.is_here else None


def _in_progress(path: Path, holder: LockHolder | None, other: str) -> str:
    """Explain that a folder is in use, and what to do."""
    if holder is None:
        return f"{path} belongs to a run that is in progress. Wait until it ends, or {other}."
    return (
        f"{path} belongs to a run that is in progress ({holder.describe()})."
        f" {holder.what_to_do(other)}"
    )


def _taken(path: Path, option: str) -> str:
    """Explain why a folder cannot be taken, and what to do. Never advise to remove it: its run may
    still be alive."""
    holder, status, works = holder_of(path), read_status(path), in_progress(path)
    if works:
        return _in_progress(path, holder, f"set {option} to another folder")
    again = (
        " To resume that run, set trainer.auto_resume=true." if option == "hydra.run.dir" else ""
    )
    new = f"Set {option} to a new folder.{again}"
    if works is None and holder is not None:
        return (
            f"{path} holds the files of another run, which was in progress on another host"
            f" ({holder.describe()}). Check there whether it has ended, or set {option} to another"
            " folder."
        )
    if holder is not None and (status is None or status.status == RUNNING):
        return (
            f"{path} holds the files of another run, whose process ended without recording why"
            f" ({holder.describe()}). {new}"
        )
    if status is None or status.ended is None:
        return f"{path} holds the files of another run. {new}"
    return f"{path} holds the files of another run ({status.status}, {moment(status.ended)}). {new}"
