"""Fixtures of tests that read data at URLs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from file_server import FileServer, serving

from lightning_3d.storage import steady_path


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Failed requests are repeated without long waits, and caches are in a folder of the test."""
    monkeypatch.setattr(steady_path, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(steady_path, "LONGEST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    """A web server of the folder `files`."""
    (tmp_path / "files").mkdir()
    with serving(tmp_path / "files") as found:
        yield found
