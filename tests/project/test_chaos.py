"""The chaos run: what it chooses, and that it ends as it should."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "chaos" / "chaos.py"


@pytest.fixture
def chaos(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("chaos", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chaos", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_apart_and_the_same_for_a_seed(chaos: ModuleType, seed: int) -> None:
    kinds = sorted(chaos.NAMED)
    count, steps = len(kinds), 170
    faults = chaos.choose(seed, count, steps, 4, kinds)
    places = [one.step for one in faults]
    assert sorted(one.kind for one in faults) == kinds
    assert all(later - earlier >= chaos.APART for earlier, later in zip(places, places[1:], strict=False))
    assert min(places) >= chaos.FIRST and max(places) <= steps - chaos.APART and all(1 <= one.rank < 4 for one in faults)
    assert [(one.kind, one.step, one.rank) for one in chaos.choose(seed, count, steps, 4, kinds)] == [
        (one.kind, one.step, one.rank) for one in faults
    ]


def test_too_few_steps_are_refused(chaos: ModuleType) -> None:
    with pytest.raises(SystemExit, match="9 faults need at least 118 steps; got --steps 60"):
        chaos.choose(0, 9, 60, 4, sorted(chaos.NAMED))


SHORT = "--layout dp2 --faults 2 --steps 50 --kinds kill_in_a_save nan"
LONG = "--layout dp2 --faults 5 --steps 80 --kinds kill nan flip stop full_disk"
NODES = "--layout tp2_dp2 --faults 3 --steps 70 --kinds cut nan raise --two-nodes"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", [SHORT, *(pytest.param(words, marks=pytest.mark.full) for words in (LONG, NODES))])
def test_a_run_with_faults_is_that_without(words: str) -> None:
    given = [word.replace("_", " ") if "disk" in word or "save" in word else word for word in words.split()]
    done = subprocess.run([sys.executable, str(TOOL), *given], capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same losses and weights as without faults, to the last bit; nothing is left behind" in done.stdout
