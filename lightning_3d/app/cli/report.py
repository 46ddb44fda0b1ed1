"""`lightning-3d report`: make the report of a run or a sweep from the files in its folder. Imports
no torch."""

from __future__ import annotations

from pathlib import Path

from lightning_3d.app.cli.options import Command
from lightning_3d.app.runs.report.run import write_report
from lightning_3d.app.runs.report.sweep import SWEEP_FILE, write_sweep_report
from lightning_3d.errors import ConfigError

COMMAND = Command(
    "report",
    "Write report.html for a run, or sweep.html and the reports of all jobs for a sweep, from the"
    " files in its folder.",
    takes="",
)
COMMAND.argument("FOLDER", "folder of a run (metrics.csv, config.yaml) or of a sweep (sweep.csv)")


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, lambda options, _: _run(Path(options.folder)))


def _run(folder: Path) -> int:
    print(make(folder))
    return 0


def make(folder: Path) -> Path:
    """Write the report of the run or sweep in a folder, and return its path.

    Raises:
        ConfigError: the folder does not exist, or holds neither a run nor a sweep.
    """
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Give the folder of a run or of a sweep.")
    if not (folder / SWEEP_FILE).is_file():
        return write_report(folder)
    for metrics in sorted(folder.glob("*/metrics.csv")):
        write_report(metrics.parent)
    return write_sweep_report(folder)
