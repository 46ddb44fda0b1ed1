"""The folder of a run: one run's files, never a second one's; nothing at all of a run that was refused."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lightning_3d.errors import ConfigError
from lightning_3d.run_status import RunStatus, read_status

CONFIG_FILE = "config.yaml"
LOGS = "logs"


@dataclass(frozen=True)
class RunFolder:
    """A folder that belongs to this run.

    Attributes:
        path: absolute.
        created: folders that were made for it, outermost first; `path` is among them unless it was there before.
        before: names that were in it before.
    """

    path: Path
    created: tuple[Path, ...]
    before: frozenset[str]

    @classmethod
    def claim(cls, path: Path, *, numbered: bool, option: str = "hydra.run.dir") -> RunFolder:
        """Make a folder this run's own. Of several processes that try at once, one succeeds.

        Args:
            path: wanted.
            numbered: where another run has it, take the first of path_1, path_2, ... that is free.
            option: what the user sets to name another one, for messages.

        Raises:
            ConfigError: another run has it, or it cannot be made.
        """
        path = path.absolute()
        for number in range(1000 if numbered else 1):
            place = path.with_name(f"{path.name}_{number}") if number else path
            try:
                return cls._claim(place)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(
                    f"The run folder {place} cannot be made: {error.strerror}. Set {option}."
                ) from error
        raise ConfigError(f"{path} holds the files of another run. Set {option} to a new folder, or remove it.")

    @classmethod
    def _claim(cls, path: Path) -> RunFolder:
        created = tuple(folder for folder in (*reversed(path.parents), path) if not folder.exists())
        path.mkdir(parents=True, exist_ok=True)
        before = frozenset(entry.name for entry in path.iterdir())
        (path / CONFIG_FILE).touch(exist_ok=False)
        return cls(path, created, before)

    @classmethod
    def adopt(cls, path: Path) -> RunFolder:
        """Take a folder that was prepared for this run: it holds the configuration and nothing of a run. Of several processes
        that try at once, one succeeds.

        Raises:
            ConfigError: a run took it before, or nothing can be written there.
        """
        path = path.absolute()
        folder = cls(path, (), frozenset(entry.name for entry in path.iterdir()))
        status = read_status(path)
        try:
            if folder.holds_results():
                raise FileExistsError
            RunStatus.begun().write(path, first=True)
        except FileExistsError:
            how = f" (status: {status.status})" if status is not None else ""
            raise ConfigError(f"{path} holds a run already{how}. --folder NEW repeats it in a new folder.") from None
        except OSError as error:
            raise ConfigError(f"Nothing can be written to the run folder {path}: {error.strerror}.") from error
        return folder

    def write_config(self, text: str) -> None:
        """Write the resolved configuration."""
        (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")

    def holds_results(self) -> bool:
        """Whether training made anything worth keeping: a step or a checkpoint."""
        metrics = self.path / "metrics.csv"
        steps = len(metrics.read_text("utf-8").splitlines()) - 1 if metrics.is_file() else 0
        return steps > 0 or any((self.path / "checkpoints").glob("*"))

    def discard(self) -> None:
        """Remove everything that this run put there."""
        for entry in self.path.iterdir():
            if entry.name not in self.before:
                shutil.rmtree(entry, ignore_errors=True) if entry.is_dir() else entry.unlink(missing_ok=True)
        for folder in reversed(self.created):
            try:
                folder.rmdir()
            except OSError:  # another run is beside it
                return
