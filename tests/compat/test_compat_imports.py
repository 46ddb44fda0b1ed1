"""Contract tests for imports that cost less: in processes of their own, as this one has imported
everything."""

import subprocess
import sys

import pytest


def printed(program: str) -> list[str]:
    """The words that a Python program prints."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.slow
def test_the_imports_of_a_rank_leave_out_scipy_and_collections_of_garbage() -> None:
    program = """
import gc, sys
from lightning_3d.compat import imports
asked = []
class Seen(imports._ScipySignal):
    def __getattribute__(self, name):
        asked.append(name)
        return super().__getattribute__(name)
imports._ScipySignal = Seen
collected = [generation["collections"] for generation in gc.get_stats()]
with imports.light_imports():
    print(gc.isenabled(), [generation["collections"] for generation in gc.get_stats()] == collected)
print(gc.isenabled(), gc.get_freeze_count() > 100_000, "hamming" in asked, "scipy.signal" in sys.modules)
import torchmetrics
from scipy.signal import convolve
print(torchmetrics.MeanMetric.__name__, convolve([1], [2])[0])
"""  # noqa: E501
    assert printed(program) == ["False", "True", "True", "True", "True", "False", "MeanMetric", "2"]


@pytest.mark.slow
def test_the_placeholder_for_scipy_gives_way_to_whoever_needs_more() -> None:
    program = """
import sys

import pytest
from lightning_3d.compat.imports import _ScipySignal
sys.modules["scipy.signal"] = _ScipySignal("scipy.signal")
from scipy.signal import convolve
print(convolve([1], [2])[0], type(sys.modules["scipy.signal"]).__name__)
"""
    assert printed(program) == ["2", "module"]


@pytest.mark.full
def test_torchmetrics_imports_scipy_signal() -> None:
    """If it does not, `import_torchmetrics` can go."""
    assert printed("import sys, torchmetrics; print('scipy.signal' in sys.modules)") == ["True"]
