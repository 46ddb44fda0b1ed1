"""Memory is in GiB wherever a user reads it; GB is for GPUs as they are sold, bandwidths, files and
messages."""

import re
from pathlib import Path

import pytest
from command_line import REPOSITORY

SOLD = r"\(80 GB\)|A100 80 GB|[AH]\d00-\d+GB|GPU has \d+ GB|sold with 80 GB"
NO_MEMORY = r"[\d.]+ ?GB(?:/s| of weights (?:between nodes|from the folder))|such as GB and GB/s"
PAGES = sorted(
    path
    for pattern in ("docs/*.md", "recipes/*.yaml", "README.md")
    for path in REPOSITORY.glob(pattern)
)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_memory_is_in_gib(path: Path) -> None:
    text = re.sub(r"\n# ", " ", path.read_text("utf-8"))
    text = re.sub(r"`launch\..*", "", text)  # the words of SkyPilot and dstack
    text = re.sub(f"{SOLD}|{NO_MEMORY}", "", text)
    assert re.findall(r".{30}\d ?GB\b.{10}|.{30}\bin GB\b", text) == []
