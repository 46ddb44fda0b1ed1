"""Files that may come from anywhere: reading one never waits for the other end of a pipe, and never
reads a device without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_3d.app.runs.frozen_config import read_frozen
from lightning_3d.app.training.data.token_file import read_index
from lightning_3d.errors import CheckpointError, Lightning3DError
from lightning_3d.models.safetensors_folder import read_config, read_header
from lightning_3d.storage.json_file import parse_json, read_text

READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "text": (read_text, "file.json"),
    "tokens": (lambda path: read_index(path.with_suffix(".bin")), "file.json"),
    "pretrained": (lambda path: read_config(path.parent), "config.json"),
    "configuration": (read_frozen, "config.yaml"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(("read", "name"), READERS.values(), ids=READERS)
def test_f22_a_pipe_or_a_device_is_refused(
    read: Callable[[Path], object], name: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(
        (OSError, Lightning3DError), match=r"is a pipe or a device|has no file|There is no"
    ):
        read(path)


def test_files_are_read_and_missing_ones_are_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"é": 1}', "utf-8")
    assert parse_json(read_text(tmp_path / "a")) == {"é": 1}
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "b")
    with pytest.raises(IsADirectoryError):
        read_text(tmp_path)


def test_f22_weights_that_cannot_be_read_end_in_a_message(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.symlink_to("/proc/self/mem")  # a file, but its first byte cannot be read
    with pytest.raises(
        CheckpointError, match="model.safetensors cannot be read: Input/output error"
    ):
        read_header(path)
