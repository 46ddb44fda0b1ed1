"""Workers of a DataLoader outlive every signal that is sent to all processes of a run, and never
their rank."""

import multiprocessing
import os
import signal

import pytest
from starts import in_fresh_process
from torch.utils.data import DataLoader

from lightning_3d.ranks.process_ties import tie_workers


def rows_after_signals(start_method: str) -> list[int]:
    """Rows of a loader whose workers get all signals after its first two rows: each worker has
    begun."""
    loader: DataLoader = DataLoader(
        range(20), batch_size=None, num_workers=2, multiprocessing_context=start_method
    )
    tie_workers(loader)
    rows = []
    for row in loader:
        rows.append(int(row))
        if len(rows) == 2:
            for worker in multiprocessing.active_children():
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    os.kill(worker.pid or 0, number)
    return rows


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_signals_to_all_processes_leave_workers_alone(start_method: str) -> None:
    assert in_fresh_process(rows_after_signals, start_method) == list(range(20))


def read_and_leave() -> None:
    loader: DataLoader = DataLoader(
        range(20), batch_size=None, num_workers=2, persistent_workers=True
    )
    tie_workers(loader)
    globals()["kept"] = iter(loader)
    next(globals()["kept"])


def exit_codes_of_ranks_with_workers() -> list[int | None]:
    ranks = [multiprocessing.get_context("fork").Process(target=read_and_leave) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    return codes


def test_rank_that_ends_does_not_wait_for_its_workers() -> None:
    assert in_fresh_process(exit_codes_of_ranks_with_workers) == [0] * 3
