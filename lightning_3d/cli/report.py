"""`lightning-3d report`: makes the report of a run, or of a sweep, from the files in its folder. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_3d.cli.exit_codes import guarded
from lightning_3d.errors import ConfigError
from lightning_3d.runs.report import write_report, write_sweep_report
from lightning_3d.runs.report.sweep import SWEEP_FILE


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightning-3d report",
        description="Make report.html of a run, or sweep.html of a sweep and the reports of its jobs, from the files in the folder.",
    )
    parser.add_argument("folder", metavar="FOLDER", help="of a run (metrics.csv, config.yaml) or of a sweep (sweep.csv)")
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)

    def act() -> int:
        print(make(Path(options.folder)))
        return 0

    return guarded(act, told=(OSError,))


def make(folder: Path) -> Path:
    """The report of what is in a folder.

    Raises:
        ConfigError: there is no folder, or neither a run nor a sweep in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder} to report on.")
    if not (folder / SWEEP_FILE).is_file():
        return write_report(folder)
    for metrics in sorted(folder.glob("*/metrics.csv")):
        write_report(metrics.parent)
    return write_sweep_report(folder)
