"""Ranks that do not join are named, by the ranks that have."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from command_line import environment

SCRIPT = """
import os, sys
rank = int(sys.argv[1])
from lightning_3d.errors import RendezvousError
from lightning_3d.ranks.meeting_store import connect_store
try:
    connect_store(rank, 3, 6.0)
except RendezvousError as error:
    print(error)
    sys.exit(error.exit_code)
"""


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


def start(code: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment() | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def ended() -> dict[str, list[tuple[int, str, str]]]:
    """(exit code, output, errors) of the ranks that join, by which one does not; and of rank 0 on a port that another process has."""
    started: dict[str, list[subprocess.Popen[str]]] = {}
    for missing in (0, 2):
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
        joining = [rank for rank in range(3) if rank != missing]
        started[f"without {missing}"] = [start(SCRIPT, rank, LOCAL_RANK=str(rank), **place) for rank in joining]
    started |= {how: [start(TAKEN, how)] for how in ("leaves", "stays")}
    return {
        name: [(process.wait(), *outputs) for process in processes if (outputs := process.communicate(timeout=90))]
        for name, processes in started.items()
    }


Ended = dict[str, list[tuple[int, str, str]]]


def test_f54_port_of_the_earlier_attempt_is_waited_for(ended: Ended) -> None:
    for how, said in (("leaves", "connected"), ("stays", "Rank 0 must listen on port")):
        [(code, output, errors)] = ended[how]
        assert code == 0 and output.startswith(said), output + errors
        assert errors.count("s for 127.0.0.1:") == 1, errors


def test_f50_rank_that_never_joins_is_named(ended: Ended) -> None:
    (code, output, errors), (other, _, silent) = ended["without 2"]
    assert (code, other) == (1, 1)
    assert output.startswith("Rank 2 of 3 has not joined the run within 6 s. Look at the logs of the ranks that are missing"), output
    assert "lightning_3d:" not in errors + silent  # the command line prints the error, on rank 0


def test_f50_rank_0_that_never_joins_is_named_by_one_other(ended: Ended) -> None:
    (code, output, errors), (other, _, silent) = ended["without 0"]
    assert (code, other) == (1, 1)
    assert "Rank 0 of 3 could not be reached at 127.0.0.1:" in output and "within 6 s" in output, output
    assert errors.count("lightning_3d: Rank 0 of 3 could not be reached") == 1 and "lightning_3d:" not in silent
