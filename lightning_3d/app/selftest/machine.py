"""What a self-test reports about the machine, and which optional parts it lacks."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

_LIBRARIES = ("torch", "lightning", "transformers", "deepspeed", "torchao", "triton", "numpy")
_PREFIXES = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "DS_", "LIGHTNING_3D_")


@functools.cache
def absent_parts() -> dict[str, str]:
    """Name what the installation lacks, by group of cells; "triton" is for compiled cells on
    GPUs."""
    absent = {}
    if find_spec("torchao") is None:
        absent["fp8"] = "needs torchao"
    if find_spec("deepspeed") is None:
        absent["zero"] = "needs DeepSpeed"
    if shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        absent["compile"] = "needs a C++ compiler"
    if find_spec("triton") is None:
        absent["triton"] = "needs the package triton"
    return absent


def describe(accelerator: str) -> dict[str, Any]:
    """Describe versions, devices, driver and environment; runs in a worker, because it may use
    CUDA."""
    import torch

    from lightning_3d.version import __version__

    gpu = accelerator == "gpu"
    devices = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if gpu
        else []
    )
    return {
        "lightning_3d": __version__,
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "accelerator": accelerator,
        "devices": devices,
        "simulated": any(
            word in name.lower() for name in devices for word in ("simulat", "cudasim")
        ),
        "capability": list(torch.cuda.get_device_capability(0)) if gpu else None,
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()) if gpu else None,
        "driver": _driver() if gpu else None,
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str | None:
    """Ask nvidia-smi for the version of the driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
