"""Damaged and hostile input is refused in order; `make fuzz` has 100,000 cases of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment

TOOL = Path(__file__).resolve().parents[2] / "tools" / "fuzz.py"


@pytest.mark.parametrize("cases", [600, pytest.param(20_000, marks=pytest.mark.full)])
@pytest.mark.timeout(1500)
def test_f22_whatever_is_read_ends_in_a_result_or_a_message(cases: int) -> None:
    command = [sys.executable, str(TOOL), "--cases", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False, env=environment())
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "each case ended in a result or in one message" in done.stdout


def test_the_fuzzer_would_tell() -> None:
    """A case that takes too long, raises something else, or runs code of the input is a problem."""
    script = f"""
import sys
sys.path.insert(0, {str(TOOL.parent)!r})
import fuzz
fuzz.LIMIT_SECONDS = 1
fuzz.SHARES = dict.fromkeys(["slow", "wrong", "unsafe"], 1)

class Broken(fuzz.Fuzzer):
    def __init__(self, folder, seed):
        super().__init__(folder, seed)
        self.kinds = {{"slow": self.slow, "wrong": self.wrong, "unsafe": self.unsafe}}
    def slow(self, numbers):
        while True:
            pass
    def wrong(self, numbers):
        raise KeyError("version")
    def unsafe(self, numbers):
        import pickle
        pickle.loads(pickle.dumps(fuzz.Bomb(self.canary)))

fuzz.Fuzzer = Broken
for problem in fuzz.fuzz(1, 0, ["slow", "wrong", "unsafe"]):
    print("PROBLEM", problem)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.count("PROBLEM") == 3, done.stdout + done.stderr
    for words in ("longer than 1 s", "KeyError: 'version'", "code of the input was run"):
        assert words in done.stdout, done.stdout + done.stderr
