"""Attempts of a run: on this machine, or on two nodes whose network can be cut. All output is kept,
with the time of each line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from two_nodes import ADDRESSES, TwoNodes

ROOT = Path(__file__).resolve().parents[2]
_END_SECONDS = 60.0
_POLL_SECONDS = 0.05

Watch = Callable[[], str | None]
"""Called again and again while an attempt runs; "terminate" or "cut" is what to do to it now."""


class Output:
    """The lines that a run has printed, with the time of each."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []
        self._readers: list[threading.Thread] = []

    def follow(self, stream: IO[str] | None) -> None:
        """Read a stream to its end, in a thread."""
        assert stream is not None

        def read() -> None:
            for line in stream:
                self.lines.append((time.time(), line.rstrip("\n")))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._readers.append(thread)

    def wait(self) -> None:
        """Wait until all streams have ended."""
        for reader in self._readers:
            reader.join(_END_SECONDS)
        self._readers.clear()

    def end(self, count: int = 20) -> str:
        return "\n".join(line for _, line in self.lines[-count:])


class Command(Protocol):
    """A command that runs, as `subprocess.Popen` shows it."""

    @property
    def stdout(self) -> IO[str] | None: ...

    def poll(self) -> int | None: ...

    def send_signal(self, number: int) -> None: ...


def start_command(overrides: Sequence[str], folder: Path, env: dict[str, str]) -> Command:
    """Start `lightning-3d train`."""
    command = [sys.executable, "-m", "lightning_3d", "train", *overrides]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=pipe,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )


class _Forked:
    def __init__(self, number: int, stdout: IO[str]) -> None:
        self.number, self.stdout = number, stdout
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.number, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if ended else None
        return self._code

    def send_signal(self, number: int) -> None:
        os.kill(self.number, number)


def fork_command(overrides: Sequence[str], folder: Path, env: dict[str, str]) -> Command:
    """Fork `lightning-3d train` from this process, which imports torch and its friends once for all
    commands."""
    import lightning_3d.app.training.run  # noqa: F401
    from lightning_3d.app.cli.main import main

    reads, writes = os.pipe()
    number = os.fork()
    if number:
        os.close(writes)
        return _Forked(number, os.fdopen(reads, errors="replace"))
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.update(env)
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
        for stream in (1, 2):
            os.dup2(writes, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", 1, closefd=False) for stream in (1, 2))
        code = main(["train", *overrides])
    finally:
        sys.stdout.flush()
        os._exit(code)


def train_here(process: Command, output: Output, watch: Watch) -> int:
    """Wait until a run on this machine ends. Returns its exit code."""
    output.follow(process.stdout)
    told = False
    try:
        while (code := process.poll()) is None:
            if watch() == "terminate" and not told:
                process.send_signal(signal.SIGTERM)
                told = True
            time.sleep(_POLL_SECONDS)
        output.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)  # the kernel ends its ranks
    return code


def train_on(
    nodes: TwoNodes,
    count: int,
    ranks: int,
    overrides: Sequence[str],
    env: dict[str, str],
    output: Output,
    watch: Watch,
) -> int:
    """Train with torchrun on the first `count` nodes until the ranks of node 0 have ended. Returns
    its exit code.

    Args:
        nodes: both nodes. Their network is whole again afterwards.
        count: number of nodes in use.
        ranks: ranks of each node.
        overrides: command line of the run.
        env: environment of the run.
        output: gets what all nodes print.
        watch: says when to cut the network, or to end the run.
    """
    folder = nodes.hosts[0].parent
    meet = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"{ADDRESSES[0]}:29400",
        "--rdzv-id",
        "chaos",
        "--max-restarts",
        "0",
    ]
    place = [
        "--nnodes",
        str(count),
        "--nproc-per-node",
        str(ranks),
        "--log-dir",
        str(folder / "torchrun"),
        *meet,
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *place,
        str(ROOT / "train.py"),
        *overrides,
    ]
    processes = [nodes.start(node, command, folder, env) for node in range(count)]
    for process in processes:
        output.follow(process.stdout)
    told = False
    try:
        while processes[0].poll() is None:
            asked = watch()
            if asked == "cut":
                nodes.cut()
            elif asked == "terminate" and not told:
                # a second signal would end torchrun before its ranks have saved
                told = True
                for process in processes:
                    os.killpg(process.pid, signal.SIGTERM)
            time.sleep(_POLL_SECONDS)
        if processes[0].returncode == 0:
            for process in processes[1:]:
                process.wait(_END_SECONDS)
    finally:
        nodes.kill()  # torchrun on a node that is cut off would wait for minutes
        for process in processes:
            process.wait(_END_SECONDS)
        nodes.mend()
        output.wait()
    return int(processes[0].returncode)
