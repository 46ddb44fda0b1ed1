"""The simulation notices every wait for a stream that is missing in the package: each is deleted in
turn."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "cuda_sim"
MOST = 6
"""Deletions that one process makes, which takes several seconds to import torch; a file with more
has a process of its own."""


def _groups() -> list[list[str]]:
    """Files of the package with something to delete, in groups of at most `MOST` deletions."""
    sys.path.insert(0, str(TOOLS))
    import mutations

    counts = Counter(site.file for site in mutations.sites())
    groups: list[list[str]] = []
    for file in sorted(counts):
        if not groups or sum(counts[other] for other in groups[-1]) + counts[file] > MOST:
            groups.append([])
        groups[-1].append(file)
    return groups


def _run(*arguments: str) -> str:
    command = [sys.executable, str(TOOLS / "mutations.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_the_fits_pass_without_a_deletion() -> None:
    assert _run("--unchanged") == ""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("files", _groups(), ids=" ".join)
def test_every_deletion_is_caught(files: list[str]) -> None:
    said = _run("--deletions", *files)
    assert " deletions, 0 not caught" in said and all(f"{file}:" in said for file in files)
