"""Ranks without work: an elastic run may have more ranks than the largest layout that fits. Imports no torch.

They wait until rank 0 says that the run has ended, so that the launcher sees all ranks end together.
"""

from __future__ import annotations

import time

from lightning_3d.ranks.boards import Board

_ENDED, _LEFT = "run_ended", "spare_left"
_POLL_SECONDS = 1.0
_LEAVE_SECONDS = 10.0


def wait_for_end(board: Board, rank: int) -> int:
    """Wait, as a rank without work, until the run has ended. Returns its exit code.

    A failure of another rank ends this process meanwhile (`FailureReporter.watch`).
    """
    while True:
        try:
            ended = board.shared(_ENDED)
        except (RuntimeError, OSError):  # the store is gone with rank 0, which had no time to say why
            return 1
        if ended:
            board.share(_LEFT, rank, "yes")
            return int(ended[0])
        time.sleep(_POLL_SECONDS)


def release_spare(board: Board, code: int, count: int) -> None:
    """Tell the ranks without work, from rank 0, that the run has ended, and wait until they have read it: rank 0 may serve the store."""
    board.share(_ENDED, 0, str(code))
    deadline = time.monotonic() + _LEAVE_SECONDS
    while len(board.shared(_LEFT)) < count and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS / 10)
