"""CSV files of a run that a later attempt continues."""

import os
from pathlib import Path

import pytest

from lightning_3d.app.runs.metrics_file import keep_rows, read_rows
from lightning_3d.storage.json_file import replace_text
from lightning_3d.storage.surviving import Surviving

TEXT = "step,loss\n1,5\n2,4\n3,3\n"


def test_rows_at_the_end_are_cut_off_and_no_other_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(TEXT)
    monkeypatch.setattr("lightning_3d.app.runs.metrics_file.replace_text", None)
    keep_rows(file, ("step", "loss"), read_rows(file, last_step=2))
    assert file.read_text() == "step,loss\n1,5\n2,4\n"


def test_a_new_column_is_written_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text(TEXT)
    rows = read_rows(file)

    def fails(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.replace", fails)
        keep_rows(file, ("step", "loss", "new"), rows)
    assert file.read_text() == TEXT and list(tmp_path.iterdir()) == [file]
    keep_rows(file, ("step", "loss", "new"), rows)
    assert file.read_text() == "step,loss,new\n1,5,\n2,4,\n3,3,\n"
    replace_text(file, "x")
    assert file.read_text() == "x"


def test_errors_of_the_storage_become_one_warning(tmp_path: Path) -> None:
    surviving = Surviving(tmp_path)
    with pytest.warns(UserWarning, match="training continues"), surviving:
        raise OSError(28, "No space left on device")
    with surviving:
        raise OSError(28, "No space left on device")
    with pytest.raises(ValueError, match="other"), surviving:
        raise ValueError("other")


def test_a_link_and_a_device_stay_what_they_are(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    replace_text(link, "x")
    assert link.is_symlink() and file.read_text() == "x"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    replace_text(pipe, "x")
    assert pipe.is_fifo() and os.read(reader, 9) == b"x"
    os.close(reader)
