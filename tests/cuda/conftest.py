"""Everything here needs the environment of `make test-cuda`."""

import gc
import importlib
import os
import shutil
import sys
import tempfile

import pytest
import ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking whether there is a GPU does not touch it
SIMULATED = "simulated_cuda.autoload" in sys.modules


def pytest_configure(config: pytest.Config) -> None:
    """A folder for what one process computes, which `simulated_parity` shares among the workers and
    `mutations.py`."""
    if SIMULATED and "SIMULATED_REFERENCES" not in os.environ:
        folder = os.environ["SIMULATED_REFERENCES"] = tempfile.mkdtemp(prefix="references_")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import once what all ranks need; they are forked from here, so nothing of it may touch a
    device, as torchao does."""
    # where tests run
    if SIMULATED and (
        hasattr(session.config, "workerinput") or not session.config.option.numprocesses
    ):
        os.environ["DS_ACCELERATOR"] = "cuda"
        sys.modules["torchao"] = None  # type: ignore[assignment]
        for name in ranks.PRELOAD:
            importlib.import_module(name)
        del sys.modules["torchao"]
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/cuda/" in str(item.path):
            item.add_marker("cuda")
