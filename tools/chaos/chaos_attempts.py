"""Attempts of a run: on this machine, or on two nodes whose network can be cut. All output is kept, with the time of each line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

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


def train_here(overrides: Sequence[str], folder: Path, env: dict[str, str], output: Output, watch: Watch) -> int:
    """Train on this machine until the run ends. Returns its exit code."""
    command = [sys.executable, "-m", "lightning_3d", "train", *overrides]
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
    )
    output.follow(process.stdout)
    told = False
    try:
        while process.poll() is None:
            if watch() == "terminate" and not told:
                process.send_signal(signal.SIGTERM)
                told = True
            time.sleep(_POLL_SECONDS)
        output.wait()
    finally:
        if process.poll() is None:
            process.kill()  # the kernel ends its ranks
            process.wait()
    return process.returncode


def train_on(nodes: TwoNodes, count: int, ranks: int, overrides: Sequence[str], env: dict[str, str], output: Output, watch: Watch) -> int:
    """Train with torchrun on the first `count` nodes until the ranks of node 0 have ended. Returns its exit code.

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
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--rdzv-id", "chaos", "--max-restarts", "0"]
    place = ["--nnodes", str(count), "--nproc-per-node", str(ranks), "--log-dir", str(folder / "torchrun"), *meet]
    command = [sys.executable, "-m", "torch.distributed.run", *place, str(ROOT / "train.py"), *overrides]
    processes = [nodes.start(node, command, folder, env) for node in range(count)]
    for process in processes:
        output.follow(process.stdout)
    try:
        while processes[0].poll() is None:
            asked = watch()
            if asked == "cut":
                nodes.cut()
            elif asked == "terminate":
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
