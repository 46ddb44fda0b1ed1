"""Train several contenders side by side, one step of each in turn, and say on what they were
measured.

A shared machine gets slower and faster by several per cent from one minute to the next. Contenders
that take turns see the same machine: all but one are stopped (SIGSTOP), and a round compares steps
that ran within seconds of each other.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from load import Load, LoadMeter

from lightning_3d.app.config.machine import gpu_names
from lightning_3d.ranks.process_ties import die_with

WORKER = Path(__file__).with_name("peers_worker.py")
LIBRARIES = ("torch", "lightning", "deepspeed", "transformers", "accelerate")
Round = dict[str, list[float]]
"""Seconds of each step of a round, by the contender's name."""


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
        **({"gpus": gpus} if (gpus := gpu_names()) else {}),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


class Contender:
    """The ranks of one contender of `peers_worker.py`, which train step by step when they are told
    to.

    Args:
        kind: name in `peers_worker.CONTENDERS`.
        layout: for instance "tp2_dp2"; it has `world_size` ranks of `threads` threads each.
        steps: that it will be asked for.
    """

    def __init__(
        self, kind: str, layout: str, world_size: int, *, steps: int, threads: int = 1
    ) -> None:
        self.name = f"{kind} {layout}"
        self._command = [sys.executable, str(WORKER), kind, layout, f"--steps={steps}"]
        self._environments = environments(world_size, threads)
        self._processes: list[subprocess.Popen] = []
        self._told: list[int] = []  # write ends: a byte lets a rank take its next step
        self._heard: list[int] = []  # read ends: a byte says that a rank has taken it
        self._started = False

    def __enter__(self) -> Contender:
        self._folder = tempfile.TemporaryDirectory()
        for rank, environment in enumerate(self._environments):
            go, told = os.pipe()
            heard, done = os.pipe()
            command = [*self._command, f"--go={go}", f"--done={done}"]
            with self._log(rank).open("wb") as log:
                # a stopped worker would not notice that this process is gone
                tie = partial(die_with, os.getpid())
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(go, done),
                    preexec_fn=tie,
                )
            os.close(go)
            os.close(done)
            self._processes.append(process)
            self._told.append(told)
            self._heard.append(heard)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for end in (*self._told, *self._heard):
            os.close(end)
        self._folder.cleanup()

    def step(self, timeout: float = 300) -> float:
        """Let all ranks take one step, and stop them. Returns the seconds until the last one was
        done.

        Raises:
            RuntimeError: a rank ended, or the time is over; with the end of its output.
        """
        started = time.perf_counter()
        self._signal(signal.SIGCONT)
        for told in self._told if self._started else ():
            os.write(told, b".")
        self._started = True
        for rank, heard in enumerate(self._heard):
            ready, _, _ = select.select([heard], [], [], timeout)
            if not ready or not os.read(heard, 1):
                tail = self._log(rank).read_text(errors="replace")[-4000:]
                raise RuntimeError(
                    f"{self.name}: rank {rank} {'ended' if ready else 'waits'}. It said:\n{tail}"
                )
        seconds = time.perf_counter() - started
        self._signal(signal.SIGSTOP)
        return seconds

    @property
    def processes(self) -> list[int]:
        """Ids of its ranks."""
        return [process.pid for process in self._processes]

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank_{rank}.txt"


def take_turns(
    contenders: Sequence[Contender], *, rounds: int, steps: int, warmup: int
) -> list[Round]:
    """Train all of them, `warmup` steps first. In every other round they go backwards."""
    return take_turns_under_load(contenders, rounds=rounds, steps=steps, warmup=warmup)[0]


def take_turns_under_load(
    contenders: Sequence[Contender], *, rounds: int, steps: int, warmup: int
) -> tuple[list[Round], Load]:
    """As `take_turns`, and measure what other processes of this machine did during the rounds."""
    with ExitStack() as running:
        for contender in contenders:
            started = time.perf_counter()
            running.enter_context(contender)
            for _ in range(warmup):
                contender.step()
            print(
                f"{contender.name}: ready after {time.perf_counter() - started:.0f} s", flush=True
            )
        measured: list[Round] = []
        meter = LoadMeter(process for contender in contenders for process in contender.processes)
        for index in range(rounds):
            seconds: Round = {contender.name: [] for contender in contenders}
            for _ in range(steps):
                for contender in contenders if index % 2 == 0 else contenders[::-1]:
                    seconds[contender.name].append(contender.step())
                    meter.look()
            measured.append(seconds)
            shown = ", ".join(f"{name} {median(each):.3f} s" for name, each in seconds.items())
            print(f"round {index + 1}: {shown}", flush=True)
        return measured, meter.read()


def ratios(rounds: Sequence[Round], numerator: str, denominator: str) -> list[float]:
    """The ratio of two contenders' median steps in each round, the smallest first."""
    return sorted(median(each[numerator]) / median(each[denominator]) for each in rounds)


def median_ratio(rounds: Sequence[Round], numerator: str, denominator: str) -> float:
    """Median over the rounds of the ratio of two contenders' median steps."""
    return median(ratios(rounds, numerator, denominator))


def median_step(rounds: Sequence[Round], name: str) -> float:
    """Median over the rounds of a contender's median step, in seconds."""
    return median(median(each[name]) for each in rounds)


def environments(world_size: int, threads: int) -> list[dict[str, str]]:
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
