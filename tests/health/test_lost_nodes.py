"""A node without a network is noticed by the others; one whose process is only stopped is not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import environment
from two_nodes import ADDRESSES, TwoNodes, available, two_nodes

PROCESS = """
import os, pickle, sys, time
from pathlib import Path
from lightning_3d.health import lost_nodes, processes
from lightning_3d.health.lost_nodes import LostNodes

rank, rounds, folder = int(sys.argv[1]), 0, Path(sys.argv[2])
processes._BOOT_ID = folder / f"boot{rank // 2}"
processes._BOOT_ID.write_text(f"boot {rank // 2}")

def all_gather(mine):  # through files
    global rounds
    rounds += 1
    draft = folder / f"draft{rank}"
    draft.write_bytes(pickle.dumps(mine))
    draft.rename(folder / f"{rounds}-{rank}")
    while len(found := sorted(folder.glob(f"{rounds}-*"))) < 4:
        time.sleep(0.05)
    return [pickle.loads(path.read_bytes()) for path in found]

lost_nodes.GONE_SECONDS = 1.0

class Reporter:
    reason = ""
    def end_all(self, text):
        print(text, flush=True)
        os._exit(1)

watch = LostNodes.watch(Reporter(), rank, all_gather, 4.0, lambda: 0)
(folder / f"up-{rank}").touch()
while not (folder / "end").exists():
    time.sleep(0.1)
watch.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="this machine lets nobody make network namespaces")
@pytest.mark.parametrize("cut", [True, pytest.param(False, marks=pytest.mark.full)])
def test_f48_a_node_that_is_cut_off(tmp_path: Path, cut: bool) -> None:
    """Their host names are equal, as those of containers may be, and that of rank 0's node leads it to 127.0.1.1, as on Debian."""
    with two_nodes(tmp_path) as nodes:
        nodes.names, nodes.hosts = ["box", "box"], [tmp_path / "hosts0", tmp_path / "hosts1"]
        for hosts, address in zip(nodes.hosts, ("127.0.1.1", ADDRESSES[0]), strict=True):
            hosts.write_text(f"{address} master\n")
        processes = [start(nodes, rank, tmp_path) for rank in range(4)]
        while len(list(tmp_path.glob("up-*"))) < 4:
            time.sleep(0.1)
        time.sleep(2.0)  # until they have connected
        if cut:
            nodes.cut()
            assert [process.wait(15) for process in (processes[0], *processes[2:])] == [1, 1, 1]
            assert "node box with 2 ranks (2-3) is lost: it has not answered the node box for 4 s" in (tmp_path / "0.log").read_text()
            assert "node box with 2 ranks (0-1) is lost: it has not answered the node box for 4 s" in (tmp_path / "2.log").read_text()
            assert not (tmp_path / "3.log").read_text(), "its neighbor has said it"
        else:
            subprocess.run(["pkill", "-STOP", "-f", f"process 2 {tmp_path}"], check=True)
            time.sleep(6.0)
            assert not any((tmp_path / f"{rank}.log").read_text() for rank in range(4))
            subprocess.run(["pkill", "-CONT", "-f", f"process 2 {tmp_path}"], check=True)
        (tmp_path / "end").touch()
        assert [process.wait(15) for process in processes[1 if cut else 0 : 2 if cut else 4]] == [0] * (1 if cut else 4)


def start(nodes: TwoNodes, rank: int, folder: Path) -> subprocess.Popen[str]:
    (folder / "process").write_text(PROCESS)
    command = [sys.executable, str(folder / "process"), str(rank), str(folder)]
    return nodes.start(rank // 2, command, folder, environment() | {"MASTER_ADDR": "master"}, folder / f"{rank}.log")
