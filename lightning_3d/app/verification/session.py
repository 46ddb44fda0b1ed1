"""A self-test: all cells one after the other on the same workers, within a time limit."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from lightning_3d.app.verification import cell_ranks
from lightning_3d.app.verification.cells import KERNEL, Cell
from lightning_3d.app.verification.tiny_models import Recipe, ReferenceResult
from lightning_3d.app.verification.verdicts import (
    FAILED,
    HANGS,
    NOT_REACHED,
    SKIPPED,
    CellVerdict,
    SelfTest,
    compare,
    judge,
)
from lightning_3d.app.verification.workers import CallFailed, CallHung, Workers
from lightning_3d.ranks.progress import task


def run(
    cells: Sequence[Cell],
    ranks: int,
    gpus: int,
    seconds: float,
    prepare: Callable[[], None] | None = None,
) -> SelfTest:
    """Run the cells.

    Args:
        ranks: number of ranks. gpus: number of GPUs that they use; 0: CPU ranks. With more ranks
            than GPUs, ranks share GPUs.
        seconds: time limit of all cells, the start of the workers included. A cell is not started
            after it.
        prepare: function that each worker calls when it starts.

    Raises:
        CallFailed: the workers did not start.
    """
    deadline = time.monotonic() + seconds
    accelerator = "gpu" if gpus else "cpu"
    with Workers(ranks, gpus, prepare) as workers:
        with task(f"starting {ranks} ranks"):
            machine = workers.call(describe, 1, 120.0, accelerator)[0] | {
                "ranks": ranks,
                "gpus": gpus,
            }
        verdicts, references = [], _References(workers, accelerator)
        with task("comparing", len(cells), "cells") as advance:
            for cell in cells:
                verdicts.append(
                    _verdict(cell, ranks, machine, workers, references, deadline, accelerator)
                )
                advance(1)
    return SelfTest(machine, verdicts)


class _References:
    """Results of the plain loop, each computed once by the worker of rank 0."""

    def __init__(self, workers: Workers, accelerator: str) -> None:
        self._workers, self._accelerator = workers, accelerator
        self._known: dict[Recipe, ReferenceResult] = {}

    def get(self, recipe: Recipe, seconds: float) -> ReferenceResult:
        if recipe not in self._known:
            self._known[recipe] = self._workers.call(
                cell_ranks.reference, 1, seconds, recipe, self._accelerator
            )[0]
        return self._known[recipe]


def _verdict(
    cell: Cell,
    ranks: int,
    machine: dict[str, Any],
    workers: Workers,
    references: _References,
    deadline: float,
    accelerator: str,
) -> CellVerdict:
    capability = tuple(machine["capability"]) if machine["capability"] else None
    if why := cell.missing(ranks, capability, absent_parts()):
        return CellVerdict(cell, SKIPPED, why=why)
    left = deadline - time.monotonic()
    if left <= 0:
        return CellVerdict(cell, NOT_REACHED, why="time is over; use a larger --minutes")
    started, limit = time.monotonic(), min(cell.seconds, max(left, 1.0))
    try:
        verdict = _compare(cell, workers, references, limit, accelerator)
    except CallFailed as error:
        verdict = CellVerdict(cell, FAILED, why=_last_line(str(error)), trace=str(error))
    except CallHung as error:
        cut_short = limit < cell.seconds
        why = (
            "the time limit ended it; use a larger --minutes"
            if cut_short
            else f"no answer within {limit:.0f} s"
        )
        verdict = CellVerdict(cell, NOT_REACHED if cut_short else HANGS, why=why, trace=str(error))
    return replace(verdict, seconds=time.monotonic() - started)


def _compare(
    cell: Cell, workers: Workers, references: _References, limit: float, accelerator: str
) -> CellVerdict:
    folder = workers.folder / f"cell_{time.monotonic_ns()}"
    if cell.kind == KERNEL:
        differences = workers.call(cell_ranks.attention, 1, limit, cell, accelerator, str(folder))[
            0
        ]
        return CellVerdict(cell, judge(cell, differences), differences)
    reference = references.get(cell_ranks.recipe_of(cell), limit)
    return compare(
        cell,
        workers.call(cell_ranks.train, cell.ranks, limit, cell, accelerator, str(folder)),
        reference,
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was reported"


# What is reported about the machine, and which optional parts it lacks

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
