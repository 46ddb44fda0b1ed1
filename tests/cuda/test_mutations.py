"""The simulation notices every wait for a stream that is missing in the package: each is deleted in turn."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "cuda_sim" / "mutations.py"


@pytest.mark.timeout(900)
def test_every_deletion_is_caught() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " deletions, 0 not caught" in done.stdout
