"""Functions on simulated GPUs: ranks that are forked from this process, which has imported
everything and never touches CUDA itself.

Each call has ranks of its own, because their environment says how the simulation behaves. See
tools/cuda_sim/README.md.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity import ACCELERATOR

TAIL_LINES = 25
GRACE_SECONDS = 25.0
"""After the first rank has failed, how long the others may take to end by themselves: those that
wait in NCCL are ended after 15."""
NOISE = re.compile(r"\[cudasim[^]]*\] (not simulated: cudnnGetVersion|communicator )")
"""Lines of the simulation that are no fault: torch asks for cuDNN's version, and lists what it
finds."""

_calls = itertools.count()


class RankFailure(AssertionError):
    """A rank raised, died, hung, or the simulation complained; the message has the end of each
    rank's output."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: exit code, negative for a signal; None if it had to be killed.
        result: what the function returned; None if it did not.
        output: everything that the rank printed.
    """

    code: int | None
    result: Any
    output: str

    @property
    def complaints(self) -> list[str]:
        """What the simulation had to say."""
        return [
            line
            for line in self.output.splitlines()
            if "[cudasim" in line and not NOISE.search(line)
        ]


def run(fn: Callable[..., Any], world_size: int, *args: Any, **more: Any) -> list[Any]:
    """Results of ``fn(*args, **kwargs)`` on each of ``world_size`` simulated GPUs; for the further
    arguments see ``attempt``.

    Raises:
        RankFailure: a rank did not return, or the simulation found something wrong.
    """
    ranks = attempt(fn, world_size, *args, **more)
    if any(rank.code != 0 or rank.complaints for rank in ranks):
        raise RankFailure(_failures(ranks))
    return [rank.result for rank in ranks]


def attempt(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    environment: Mapping[str, Any] | None = None,
    hosts: int = 1,
    timeout: float = 120,
    accelerator: str = "gpu",
    **kwargs: Any,
) -> list[Ended]:
    """How each rank ended.

    Args:
        environment: further variables of the ranks, such as CUDASIM_NCCL_MOST.
        hosts: over which the ranks are spread, each with its own GPUs.
        timeout: seconds after which all are killed.
        accelerator: "cpu" for the same ranks on gloo.
    """
    folder = Path(tempfile.mkdtemp(prefix="simulated_ranks_"))
    shared = Path("/dev/shm") / f"cudasim-{os.getpid()}-{next(_calls)}"
    variables = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size // hosts,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
        "CUDASIM_FOLDER": shared,
        "CUDASIM_DEVICES": world_size // hosts,
        "TORCH_FR_BUFFER_SIZE": 0,
        ACCELERATOR: accelerator,
        **(environment or {}),
    }
    assert not torch.cuda.is_initialized(), (
        "this process has touched a device, so it cannot be forked any more"
    )
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        children = [
            _fork(rank, variables, folder, lambda: fn(*args, **kwargs), timeout)
            for rank in range(world_size)
        ]
        codes = _wait(children, timeout)
        return [_ended(folder, rank, code) for rank, code in enumerate(codes)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)


def _fork(
    rank: int, variables: Mapping[str, Any], folder: Path, work: Callable[[], Any], timeout: float
) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        local = rank % int(variables["LOCAL_WORLD_SIZE"])
        node = rank // int(variables["LOCAL_WORLD_SIZE"])
        os.environ.update({name: str(value) for name, value in variables.items()})
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(local), NODE_RANK=str(node), GROUP_RANK=str(node)
        )
        output = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  pytest has replaced it
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(output)
        faulthandler.dump_traceback_later(max(1.0, timeout - 5), file=output)
        code = _work(rank, folder, work)
    finally:
        os._exit(code)


def _work(rank: int, folder: Path, work: Callable[[], Any]) -> int:
    import simulated_cuda

    simulated_cuda.configure()
    torch.set_num_threads(1)
    if os.environ[ACCELERATOR] == "cpu":
        _deepspeed_on_cpu()
    code = 1
    try:
        (folder / f"{rank}.result").write_bytes(pickle.dumps(work()))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _deepspeed_on_cpu() -> None:
    """As if DeepSpeed had been imported here, and not in the process that forked this one."""
    from deepspeed.accelerator import cpu_accelerator, set_accelerator

    set_accelerator(cpu_accelerator.CPU_Accelerator())


def _wait(children: list[int], timeout: float) -> list[int | None]:
    deadline = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(children) and time.monotonic() < deadline:
        for rank, child in enumerate(children):
            if rank not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank]:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)
    for rank, child in enumerate(children):
        if rank not in codes:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return [codes.get(rank) for rank in range(len(children))]


def _ended(folder: Path, rank: int, code: int | None) -> Ended:
    result = folder / f"{rank}.result"
    log = folder / f"{rank}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return Ended(
        code, pickle.loads(result.read_bytes()) if code == 0 and result.exists() else None, text
    )


def _failures(ranks: list[Ended]) -> str:
    seen: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        lines = [line for line in rank.output.splitlines() if line.strip()]
        shown = (
            [*rank.complaints[:6], "...", *lines[-TAIL_LINES:]]
            if rank.complaints
            else lines[-TAIL_LINES:]
        )
        seen.setdefault(f"code {rank.code}\n" + "\n".join(shown), []).append(number)
    return "\n".join(f"--- ranks {numbers}: {text}" for text, numbers in seen.items())


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
