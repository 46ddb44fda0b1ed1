"""An `srun` that starts the ranks of all nodes on this machine, with the variables of SLURM; for
tests of commands that call srun."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def install(folder: Path) -> dict[str, str]:
    """Write an executable `srun` into a folder, and return the variables of a job with two nodes
    that finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "srun"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} "$@"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    return {
        "PATH": path,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SRUN_LOG": str(folder / "srun.log"),
    }


def _main(words: list[str]) -> int:
    options = dict(
        word[2:].split("=", 1)
        for word in words
        if word.startswith("--") and "=" in word and word.split("=")[0] in OPTIONS
    )
    command = words[next(place for place, word in enumerate(words) if not word.startswith("-")) :]
    nodes, per_node = int(options["nodes"]), int(options["ntasks-per-node"])
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    ranks: list[subprocess.Popen[Any]] = []

    def end(number: int, frame: Any) -> None:
        for rank in ranks:
            rank.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    if "--quit-on-interrupt" in words:
        signal.signal(signal.SIGINT, lambda number, frame: end(signal.SIGKILL, frame))
    for number in range(nodes * per_node):
        variables = {
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_NAME": "test",
            "SLURM_PROCID": str(number),
            "SLURM_NTASKS": str(nodes * per_node),
            "SLURM_LOCALID": str(number % per_node),
            "SLURM_NODEID": str(number // per_node),
            "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_CPUS_ON_NODE": "1",
        }
        ranks.append(subprocess.Popen(command, env={**os.environ, **variables}))
    with open(os.environ["SRUN_LOG"], "a") as log:
        print(*(rank.pid for rank in ranks), " ".join(words), file=log)
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):  # as --kill-on-bad-exit
            time.sleep(5)
            end(signal.SIGKILL, None)
        time.sleep(0.1)
    return max(abs(rank.returncode) for rank in ranks)


OPTIONS = ("--nodes", "--ntasks-per-node")

if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
