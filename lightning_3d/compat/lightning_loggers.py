"""Private APIs of Lightning's `CSVLogger`."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_3d.storage.surviving import Surviving


def append_to_csv_files() -> None:
    """Make every `CSVLogger` of this process append to the file of an earlier attempt.

    Lightning 2.6 (`csv_logs.ExperimentWriter`) deletes that file when the logger is first used. It
    also writes the file in place again when a new name is logged, so that a kill loses all rows.
    There is no public form.
    """
    from lightning.pytorch.loggers import csv_logs

    writer: Any = csv_logs.ExperimentWriter
    if not hasattr(writer, "last_step"):
        csv_logs.ExperimentWriter = _appending(writer)  # type: ignore[misc]


def resume_csv_file(logger: Any, last_step: int) -> None:
    """Remove rows of later steps from the file of a logger before the next row is written, because
    the run repeats these steps."""
    logger.experiment.last_step = last_step


def _appending(base: Any) -> Any:
    class AppendingWriter(base):
        last_step: int | None = None
        is_new = True

        def _check_log_dir_exists(self) -> None:
            """Replace a method that deletes the file."""
            self.surviving = Surviving(Path(self.metrics_file_path))
            self.is_new = not self._fs.isfile(self.metrics_file_path)

        def save(self) -> None:
            with self.surviving:
                if self.metrics and not self.is_new:
                    self._take_over()
                self.is_new = False  # after a failure, the end of the file may be torn
                super().save()
                self.is_new = True

        def _take_over(self) -> None:
            """Read the names of the columns, and remove rows that will be repeated or that a kill
            truncated."""
            text = self._read()
            whole = text[: text.rfind("\n") + 1]
            self.metrics_keys = next(csv.reader(io.StringIO(whole)), [])
            rows = _rows(whole)
            kept = [
                row for row in rows if self.last_step is None or not _is_later(row, self.last_step)
            ]
            if whole != text or len(kept) < len(rows):
                self._write(self.metrics_keys, kept)

        def _rewrite_with_new_header(self, fieldnames: Sequence[str]) -> None:
            self._write(fieldnames, _rows(self._read()))

        def _read(self) -> str:
            with self._fs.open(
                self.metrics_file_path, "r", newline="", encoding="utf-8", errors="replace"
            ) as file:
                return str(file.read())

        def _write(self, names: Sequence[str], rows: Sequence[dict[str, str]]) -> None:
            """Write the file beside its place and rename it."""
            draft = f"{self.metrics_file_path}.{os.getpid()}"
            with self._fs.open(draft, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, names, restval="", extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            self._fs.mv(draft, self.metrics_file_path)

    return AppendingWriter


def _rows(text: str) -> list[dict[str, str]]:
    return [
        row
        for row in csv.DictReader(io.StringIO(text, newline=""))
        if None not in row and None not in row.values()
    ]


def _is_later(row: dict[str, str], step: int) -> bool:
    return row.get("step", "").isdigit() and int(row["step"]) > step
