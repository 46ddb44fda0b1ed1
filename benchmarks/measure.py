"""Start ranks as processes, collect the step times that they report, and say on what they were measured."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

WORKER = Path(__file__).with_name("peers_worker.py")
LIBRARIES = ("torch", "lightning", "deepspeed", "transformers", "accelerate")
ABORTED = -6  # deepspeed's interpreter sometimes aborts at exit, long after the last step


@dataclass(frozen=True)
class Run:
    """One launch.

    Attributes:
        seconds: of each step after the warm-up, on rank 0.
        losses: of the same steps, where the contender reports them.
        parameters: of the whole model.
    """

    contender: str
    layout: str
    seconds: list[float]
    losses: list[float]
    parameters: int

    @property
    def step(self) -> float:
        """The median step, in seconds."""
        return median(self.seconds)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def launch(
    contender: str, layout: str, world_size: int, *, steps: int, warmup: int, threads: int = 1, timeout: float = 900
) -> Run:
    """Run one contender of `peers_worker.py` on `world_size` ranks of this machine, `threads` threads each.

    Raises:
        RuntimeError: a rank failed or the time was over; with the end of its output. No rank is left running.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(WORKER), contender, layout, f"--steps={steps}", f"--warmup={warmup}"]
        environments = _environments(world_size, threads)
        logs = [Path(folder) / f"rank_{rank}.txt" for rank in range(world_size)]
        with _ranks([*command, f"--output={result}"], environments, logs) as processes:
            codes = _wait(processes, time.monotonic() + timeout)
        finished = result.exists() and all(code in (0, ABORTED) for code in codes)
        if not finished or (contender.startswith("ours") and any(codes)):
            failed = next((rank for rank, code in enumerate(codes) if code), 0)
            tail = logs[failed].read_text(errors="replace")[-4000:]
            raise RuntimeError(f"{contender} at {layout}: ranks ended with {codes}; rank {failed} said:\n{tail}")
        return Run(contender, layout, **json.loads(result.read_text()))


def _environments(world_size: int, threads: int) -> list[dict[str, str]]:
    """What torchrun would set, for every rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    repository = str(Path(__file__).parents[1])
    common = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "benchmark",
        "PYTHONPATH": os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")])),
    }
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


@contextmanager
def _ranks(
    command: list[str], environments: list[dict[str, str]], logs: list[Path]
) -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    try:
        for environment, log in zip(environments, logs, strict=True):
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen], deadline: float) -> list[int | None]:
    """Exit codes once all ranks ended, or as soon as one failed or the time is over; None for those still running."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(code not in (None, 0, ABORTED) for code in codes):
            return codes
        time.sleep(0.05)
    return [process.poll() for process in processes]
