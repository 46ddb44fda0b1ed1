"""Ranks that do not join are named, by the ranks that have."""

from __future__ import annotations

import socket
import subprocess
import sys

from command_line import environment

SCRIPT = """
import os, sys
rank, missing = int(sys.argv[1]), sys.argv[2]
from lightning_3d.errors import RendezvousError
from lightning_3d.ranks.meeting_store import connect_store
try:
    connect_store(rank, 3, 3.0)
except RendezvousError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def without(missing: int) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of the two ranks that join."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        place = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(missing)],
            env=place | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
        if rank != missing
    ]
    return [(process.wait(), *outputs) for process in started if (outputs := process.communicate(timeout=60))]


TAKEN = """
import os, socket, sys, threading
import torch.distributed
from lightning_3d.errors import ConfigError
from lightning_3d.ranks import meeting_store

holder = socket.socket(socket.AF_INET6)
holder.bind(("::", 0))
holder.listen()
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
leaves = sys.argv[1] == "leaves"
if leaves:
    threading.Timer(1.5, holder.close).start()
else:
    meeting_store.PORT_SECONDS = 1.0
try:
    meeting_store.connect_store(0, 1, 5.0)
    print("connected")
except ConfigError as error:
    print(error)
"""


def test_f54_port_of_the_earlier_attempt_is_waited_for() -> None:
    for how, said in (("leaves", "connected"), ("stays", "Rank 0 must listen on port")):
        done = subprocess.run([sys.executable, "-c", TAKEN, how], env=environment(), capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith(said), done.stdout + done.stderr
        assert done.stderr.count("s for 127.0.0.1:") == 1, done.stderr


def test_f50_rank_that_never_joins_is_named() -> None:
    for code, output, errors in without(2):
        assert code == 1 and "lightning_3d:" not in errors  # rank 0 prints the error of a run
        assert output.startswith("Rank 2 of 3 has not joined the run within 3 s. Look at the logs of the ranks that are missing")


def test_f50_rank_0_that_never_joins_is_named_by_one_other() -> None:
    (code, output, errors), (other, _, silent) = without(0)
    assert (code, other) == (1, 1)
    assert "Rank 0 of 3 could not be reached at 127.0.0.1:" in output and "within 3 s" in output
    assert errors.count("lightning_3d: Rank 0 of 3 could not be reached") == 1 and "lightning_3d:" not in silent
