"""The watch for hangs while the store of the run is stuck, or gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_3d.health import observe, watchdog
from lightning_3d.health.processes import Process
from lightning_3d.health.watchdog import Watchdog
from lightning_3d.ranks.heartbeat import Heartbeat

ELSEWHERE = Process("node0", 4711, "99", "another machine")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "STORE_SECONDS", 0.02)
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 0.05)

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)


def watch(rank: int, shared: Callable[[str], Any], folder: Path) -> Watchdog:
    board = SimpleNamespace(shared=shared, share=lambda topic, rank, text: None)
    reporter: Any = SimpleNamespace(board=board)
    return Watchdog(
        Heartbeat(),
        lambda: 0.01,
        reporter,
        rank,
        [ELSEWHERE, Process.own(), Process.own()],
        folder / "hang",
    )


def look_until_it_ends(one: Watchdog) -> None:
    with pytest.raises(SystemExit) as ended:
        for _ in range(100):
            time.sleep(0.02)
            one._look()
    assert ended.value.code == 1


def test_one_message_of_ranks_that_find_out_one_after_another(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0, which serves the store, has ended. The other ranks, on several nodes, notice it at
    different times."""

    def gone(topic: str) -> Any:
        raise RuntimeError("the store is gone")

    for rank in (1, 2):
        look_until_it_ends(watch(rank, gone, tmp_path))
    said = capfd.readouterr().err
    assert (
        said.count(
            "The run hangs: rank 0 does not answer: process 4711 on node0 is stopped or hangs, or"
            " the machine is lost"
        )
        == 1
    ), said
    assert (tmp_path / "hang" / "message_4711_99.txt").read_text() in said


def test_a_stuck_store_takes_one_thread(tmp_path: Path) -> None:
    stuck = threading.Event()
    one = watch(1, lambda topic: stuck.wait(20), tmp_path)
    before = threading.active_count()
    one._heartbeat.beat()
    for _ in range(10):
        one._heartbeat.beat()
        one._look()
    assert threading.active_count() == before + 1
    look_until_it_ends(one)
    stuck.set()
    one._board.close()


def test_a_store_that_gets_stuck_after_it_was_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rank answers the others; that call waits forever."""
    stuck = threading.Event()
    one = watch(1, lambda topic: {}, tmp_path)
    one._reporter.board.share = lambda topic, rank, text: stuck.wait(20)  # type: ignore[method-assign]
    look_until_it_ends(one)
    assert capfd.readouterr().err.count("rank 0 does not answer") == 1
    stuck.set()
    one._board.close()


def test_f46_a_rank_that_is_ended_while_it_writes_leaves_its_last_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rank_1.txt"
    report = observe.observe(1, Heartbeat(), overdue=True)
    observe.write_report(file, report)
    before = file.read_text()
    assert "rank 1 on " in before and "test_watchdog.py" in before

    def ends(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(observe.faulthandler, "dump_traceback", ends)
    with pytest.raises(KeyboardInterrupt):
        observe.write_report(file, report)
    assert file.read_text() == before
