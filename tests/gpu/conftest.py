"""Everything here needs a real GPU: `python -m pytest tests/gpu -m gpu`. One is enough; ranks share
it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from lightning_3d.app.config.machine import visible_gpus

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU does not touch it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    real = "simulated_cuda.autoload" not in sys.modules and visible_gpus() > 0
    for item in items:
        if "/tests/gpu/" in str(item.path):
            item.add_marker("gpu")
            if not real:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def end_ranks() -> Iterator[None]:
    import gpu_ranks  # later than the number of steps is decided

    yield
    gpu_ranks.close()
