"""The simulation notices every wait for a stream that is missing in the package: each is deleted in turn."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "cuda_sim"


def _files() -> list[str]:
    """Files of the package with something to delete."""
    sys.path.insert(0, str(TOOLS))
    import mutations

    return sorted({site.file for site in mutations.sites()})


def _run(*arguments: str) -> str:
    command = [sys.executable, str(TOOLS / "mutations.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_the_fits_pass_without_a_deletion() -> None:
    assert _run("--unchanged") == ""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", _files())
def test_every_deletion_is_caught(file: str) -> None:
    assert " deletions, 0 not caught" in _run("--deletions", file)
