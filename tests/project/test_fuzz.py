"""Damaged and hostile input is refused in order; `make fuzz` has 100,000 cases of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.parametrize("cases", [600, pytest.param(20_000, marks=pytest.mark.full)])
@pytest.mark.timeout(1500)
def test_f22_whatever_is_read_ends_in_a_result_or_a_message(cases: int) -> None:
    command = [sys.executable, str(TOOL), "--cases", str(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=1400, check=False, env=environment()
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "each case ended in a result or in one message" in done.stdout


@pytest.mark.slow
def test_the_fuzzer_would_tell() -> None:
    """A case that computes or waits too long, raises something else, writes elsewhere, or runs code
    of the input is an error."""
    script = f"""
import os, sys
sys.path.insert(0, {str(TOOL.parent)!r})
import fuzz
fuzz.LIMIT_SECONDS = 1
fuzz.SHARES = dict.fromkeys(["slow", "waits", "wrong", "writes", "unsafe", "well"], 1)

class Broken(fuzz.Fuzzer):
    def __init__(self, folder, seed):
        super().__init__(folder, seed)
        self.kinds = {{name: getattr(self, name) for name in fuzz.SHARES}}
    def prepare(self):
        pass
    def slow(self, numbers):
        while True:
            pass
    def waits(self, numbers):
        os.mkfifo(self.folder / "pipe")
        (self.folder / "pipe").read_text()
    def writes(self, numbers):
        open("elsewhere", "w").close()
    def well(self, numbers):
        pass
    def wrong(self, numbers):
        raise KeyError("version")
    def unsafe(self, numbers):
        import pickle
        pickle.loads(pickle.dumps(fuzz.Bomb(self.canary)))

fuzz.Fuzzer = Broken
print("errors:", len(fuzz.fuzz(1, 0, list(fuzz.SHARES))))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False
    )
    assert "errors: 5" in done.stdout and done.stdout.count("longer than 1 s") == 2, (
        done.stdout + done.stderr
    )
    for words in (
        "in waits",
        "KeyError: 'version'",
        "elsewhere was written into the folder",
        "code of the input was run",
    ):
        assert words in done.stdout, done.stdout + done.stderr
