"""Contract tests for what `compat.lightning_loggers` uses of Lightning's CSVLogger (tried with
Lightning 2.6)."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, csv_logs

from lightning_3d.compat.lightning_loggers import append_to_csv_files, resume_csv_file


@pytest.fixture(autouse=True)
def appending(monkeypatch: pytest.MonkeyPatch) -> None:
    # restored afterwards
    monkeypatch.setattr(csv_logs, "ExperimentWriter", csv_logs.ExperimentWriter)
    append_to_csv_files()


def log(
    folder: Path, steps: range, name: str = "loss", resumed: int | None = None
) -> list[dict[str, str]]:
    logger = CSVLogger(folder, name="csv", version="")
    if resumed is not None:
        resume_csv_file(logger, resumed)
    logger.log_hyperparams({"lr": 1.0})
    for step in steps:
        logger.log_metrics({name: float(step)}, step=step)
    logger.save()
    with (folder / "csv" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_rows_of_earlier_attempts_stay_and_repeated_ones_are_replaced(tmp_path: Path) -> None:
    log(tmp_path, range(1, 5))
    rows = log(tmp_path, range(3, 6), "other", resumed=2)
    assert [(row["step"], row["loss"], row["other"]) for row in rows] == [
        ("1", "1.0", ""),
        ("2", "2.0", ""),
        ("3", "", "3.0"),
        ("4", "", "4.0"),
        ("5", "", "5.0"),
    ]
    assert len(log(tmp_path, range(9))) == len(rows) + 9, (
        "without a step that was resumed, nothing is removed"
    )


def test_an_attempt_that_logs_nothing_changes_nothing_and_a_torn_row_goes(tmp_path: Path) -> None:
    log(tmp_path, range(1, 5))
    file = tmp_path / "csv" / "metrics.csv"
    before = file.read_bytes()
    log(tmp_path, range(0), resumed=1)
    assert file.read_bytes() == before
    file.write_bytes(before[:-2])
    assert [row["step"] for row in log(tmp_path, range(7, 8))] == ["1", "2", "3", "7"]
    assert [path.name for path in file.parent.glob("metrics*")] == ["metrics.csv"]


@pytest.mark.filterwarnings("ignore:Cannot write to")
def test_a_write_that_fails_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path, range(1, 3))
    logger = CSVLogger(tmp_path, name="csv", version="")
    logger.log_metrics({"loss": 3.0, "new": 1.0}, step=3)

    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(logger.experiment._fs, "mv", fails)
        logger.save()
    logger.save()
    with (tmp_path / "csv" / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3"]
