"""Ranks without work end with the others."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import environment

from lightning_3d.ranks.boards import FolderBoard
from lightning_3d.ranks.spare import release_spare

SCRIPT = """
import sys
from pathlib import Path
from lightning_3d.ranks import spare
from lightning_3d.ranks.boards import FolderBoard

class Board(FolderBoard):
    def shared(self, topic):
        print("waits", flush=True)
        return super().shared(topic)

spare._POLL_SECONDS = 0.05
sys.exit(spare.wait_for_end(Board(Path(sys.argv[1])), 2))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_does_not_end_a_rank_without_work_before_the_others(
    tmp_path: Path, number: int
) -> None:
    """They save a checkpoint first, and a launcher kills them if one rank has ended."""
    waiting = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None and waiting.stdout.readline() == "waits\n"
    waiting.send_signal(number)
    time.sleep(0.3)
    assert waiting.poll() is None
    release_spare(FolderBoard(tmp_path), 128 + number, 1)
    assert waiting.wait(20) == 128 + number
