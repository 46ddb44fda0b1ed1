"""Ranks without work: an elastic run may have more ranks than the largest layout that fits. Imports
no torch.

They wait until rank 0 says that the run has ended, so that the launcher sees all ranks end
together.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from lightning_3d.ranks.boards import Board

_ENDED, _LEFT = "run_ended", "spare_left"
_POLL_SECONDS = 1.0
_LEAVE_SECONDS = 10.0


def wait_for_end(board: Board, rank: int) -> int:
    """Wait, as a rank without work, until the run has ended. Returns its exit code.

    A failure of another rank ends this process meanwhile (`FailureReporter.watch`). A signal does
    not: the other ranks get it too, and may have to save a checkpoint first. If this rank ended
    before them, the launcher would kill them. A second Ctrl-C ends it at once.
    """
    _wait_through_signals()
    while True:
        try:
            ended = board.shared(_ENDED)
        except (RuntimeError, OSError):
            # the store is gone with rank 0, which had no time to say why
            return 1
        if ended:
            board.share(_LEFT, rank, "yes")
            return int(ended[0])
        time.sleep(_POLL_SECONDS)


def _wait_through_signals() -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def interrupted(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, interrupted)


def release_spare(board: Board, code: int, count: int) -> None:
    """Release the ranks without work, from rank 0, when the run has ended. Wait until they have
    read it: rank 0 may serve the store."""
    board.share(_ENDED, 0, str(code))
    deadline = time.monotonic() + _LEAVE_SECONDS
    while len(board.shared(_LEFT)) < count and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
