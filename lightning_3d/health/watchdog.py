"""Ends a run that hangs, with one message that says which rank holds it up, and where.

A thread of each rank checks whether the rank makes progress. A rank that makes none asks all ranks
what they do, and writes its own stacks and collectives to a file. When all have answered, or had
time to, the lowest rank that asked compares the answers (`hang_verdict`) and ends the run.

A rank cannot answer if its process is stopped, its machine is lost, or other code holds Python's
interpreter lock. In the last case its stacks are still written, because `faulthandler` needs no
lock.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TextIO, TypeVar

from lightning_3d.health.hang_verdict import Verdict, judge
from lightning_3d.health.observe import observe, write_report
from lightning_3d.health.processes import Process
from lightning_3d.health.rank_report import RankStatus
from lightning_3d.ranks.heartbeat import Heartbeat
from lightning_3d.ranks.reporter import FailureReporter

ANSWER_SECONDS = 7.0
"""Longest time for the other ranks to say what they do."""

STACKS_SECONDS = 5.0
"""Longest time that a rank that cannot answer gets to write its stacks before it is killed: a busy
machine may be slow."""

STALE_SECONDS = 6.0
"""An answer counts if it was written again within this time."""

LOOK_SECONDS = 2.0
"""Longest time between two looks."""

STORE_SECONDS = 4.0
"""Longest time for a call of the board."""

END_SECONDS = 10.0
"""Longest time for posting the message that ends all ranks: others are given some seconds to read
it."""

_ASKED = "hang"
_log = logging.getLogger(__name__)


class Watchdog:
    """Watches this rank, and ends the run if it hangs.

    Args:
        heartbeat: what this rank does.
        allowed: function that returns the seconds that it may take for that.
        reporter: board and end of the ranks.
        rank: global rank.
        processes: of all ranks, by rank.
        folder: folder for the files of the ranks: `rank_N.txt`, or `rank_N_stacks.txt` of a rank
            that cannot answer.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        allowed: Callable[[], float],
        reporter: FailureReporter,
        rank: int,
        processes: Sequence[Process],
        folder: Path,
    ) -> None:
        self._heartbeat, self._allowed, self._reporter = heartbeat, allowed, reporter
        self._rank, self._processes = rank, processes
        self._file, self._stacks_file = folder / f"rank_{rank}.txt", _stacks_file(folder, rank)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, name="lightning_3d-watchdog", daemon=True
        )
        self._asked_at: float | None = None
        self._answered = False
        self._board = PatientCalls()
        # the last answer of each rank, and when it was read first
        self._changed: dict[int, tuple[str, float]] = {}
        self._stacks: TextIO | None = None
        self._shortest = math.inf  # seconds that an action was allowed to take

    def start(self) -> None:
        self._expect_lost_lock()
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join(LOOK_SECONDS)
        self._board.close()
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            self._stacks_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: there are files of an earlier hang
                self._file.parent.rmdir()

    def _watch(self) -> None:
        while not self._closed.wait(min(LOOK_SECONDS, self._allowed() / 4)):
            if sys.gettrace() is not None:  # in a debugger
                self._heartbeat.beat()
            try:
                self._expect_lost_lock()
                self._look()
            except Exception:
                # the store may be gone with the rank that served it; a watch that ends would let
                # the run hang
                _log.debug("the watch of rank %d looks again later", self._rank, exc_info=True)

    def _expect_lost_lock(self) -> None:
        """Let `faulthandler` write the stacks unless this thread runs again in the time of a step.
        It does not matter that what runs now may take longer: the lock may be lost in the next
        step, before this thread looks again."""
        if self._stacks is None:
            try:
                self._stacks_file.parent.mkdir(parents=True, exist_ok=True)
                self._stacks = self._stacks_file.open("w", encoding="utf-8")
            except OSError:  # a hang is found and named without files, too
                return
        if os.fstat(self._stacks.fileno()).st_size:  # the lock was only lost for a while
            self._stacks.seek(0)
            self._stacks.truncate()
        self._shortest = min(self._shortest, self._allowed())
        faulthandler.dump_traceback_later(self._shortest, file=self._stacks)

    def _look(self) -> None:
        overdue = time.monotonic() - self._heartbeat.since > self._allowed()
        if not overdue:
            self._asked_at = None
        try:
            self._take_part(overdue)
        except (TimeoutError, RuntimeError):
            # rank 0, which serves the store, is stopped, or has ended
            self._end_without_board(overdue)

    def _take_part(self, overdue: bool) -> None:
        """Answer if a rank makes no progress, and end the run if it hangs.

        Raises:
            TimeoutError: the board does not answer. RuntimeError: the store is gone.
        """
        answers = self._board.within(STORE_SECONDS, self._read)
        asked = any(report.overdue for rank, report in answers.items() if rank != self._rank)
        if overdue or asked:
            self._answer(overdue)
        elif self._answered:
            self._withdraw()
        if overdue and (self._has_waited() or self._all_have_answered()):
            self._compare()

    def _read(self) -> dict[int, RankStatus]:
        """Read what the ranks have answered lately. Each writes its answer again and again, with
        the time that it has waited."""
        now, texts = time.monotonic(), self._reporter.board.shared(_ASKED)
        self._changed = {rank: self._changed.get(rank, ("", now)) for rank in texts}
        for rank, text in texts.items():
            if self._changed[rank][0] != text:
                self._changed[rank] = text, now
        lately = {
            rank: text for rank, (text, when) in self._changed.items() if now - when < STALE_SECONDS
        }
        return {rank: RankStatus.from_json(text) for rank, text in lately.items()}

    def _has_waited(self) -> bool:
        """Return whether the others have had time to answer since this rank is overdue."""
        now = time.monotonic()
        self._asked_at = self._asked_at or now
        return now - self._asked_at >= ANSWER_SECONDS

    def _all_have_answered(self) -> bool:
        """Return whether every rank has answered since this one is overdue, or is stopped and never
        will."""
        since = self._asked_at or time.monotonic()
        answered = {rank for rank, (text, when) in self._changed.items() if text and when > since}
        return all(
            rank in answered or process.is_stopped for rank, process in enumerate(self._processes)
        )

    def _answer(self, overdue: bool) -> None:
        """Say what this rank does, and write it to its file."""
        self._answered = True
        report = observe(self._rank, self._heartbeat, overdue=overdue)
        with contextlib.suppress(OSError):
            write_report(self._file, report)
        self._share(report.to_json())

    def _withdraw(self) -> None:
        """Take the answer back: the ranks make progress again."""
        self._answered = False
        self._share("")
        self._file.unlink(missing_ok=True)

    def _share(self, text: str) -> None:
        self._board.within(
            STORE_SECONDS, lambda: self._reporter.board.share(_ASKED, self._rank, text)
        )

    def _compare(self) -> None:
        """Find the cause and end the run, if this is the lowest rank that is overdue."""
        reports = self._board.within(STORE_SECONDS, self._read)
        if (
            min((rank for rank, report in reports.items() if report.overdue), default=self._rank)
            != self._rank
        ):
            return
        silent = {
            rank: process.why_silent()
            for rank, process in enumerate(self._processes)
            if rank not in reports
        }
        verdict = judge(reports, silent)
        if not verdict.certain:  # the rank that the others wait for has longer for what it does
            return
        to_kill = [
            rank
            for rank in silent
            if self._processes[rank].is_here() and not self._processes[rank].is_stopped
        ]
        await_content([_stacks_file(self._file.parent, rank) for rank in to_kill], STACKS_SECONDS)
        for rank in silent:
            self._processes[rank].kill_if_here()
        self._stacks_file.unlink(missing_ok=True)
        message = self._message(verdict, reports[self._rank].seconds)
        self._board.within(END_SECONDS, lambda: self._reporter.end_all(message))

    def _end_without_board(self, overdue: bool) -> None:
        """End this process, because rank 0, which serves the store, does not answer. The first rank
        that comes here says so."""
        if not overdue or not (self._has_waited() or self._processes[0].is_stopped):
            return
        report = observe(self._rank, self._heartbeat, overdue=True)
        with contextlib.suppress(OSError):
            write_report(self._file, report)
        self._stacks_file.unlink(missing_ok=True)
        verdict = judge({self._rank: report}, {0: self._processes[0].why_silent()})
        message = self._message(verdict, report.seconds)
        if self._may_print(message):
            print(f"lightning_3d: {message}", file=sys.stderr, flush=True)
        self._processes[0].kill_if_here()
        os._exit(1)

    def _may_print(self, message: str) -> bool:
        """Write the message to the folder of the run. False: a rank that was earlier has written
        and printed it.

        The file stays, because ranks on other nodes may come later. So each attempt of the run has
        its own. Where nothing can be written, each rank prints the message.
        """
        first = self._processes[0]
        try:
            with (self._file.parent / f"message_{first.pid}_{first.started}.txt").open(
                "x", encoding="utf-8"
            ) as file:
                file.write(f"{message}\n")
        except FileExistsError:
            return False
        except OSError:
            pass
        return True

    def _message(self, verdict: Verdict, seconds: float) -> str:
        return (
            f"The run hangs: {verdict.text} Each rank's stacks and last collectives are in"
            f" {self._file.parent}. Nothing has happened for {seconds:.0f} s (hang_timeout). To"
            " resume the last checkpoint, start the run again with trainer.auto_resume=true, or"
            ' your script with ckpt_path="last".'
        )


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}_stacks.txt"


def await_content(files: Iterable[Path], seconds: float) -> None:
    """Wait until none of the files that exist is empty, at most for `seconds`."""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):  # a file may vanish
        for file in files:
            while time.monotonic() < end and file.is_file() and file.stat().st_size == 0:
                time.sleep(0.05)


# Calls that may never return, such as those of a store whose server is stopped.

_Result = TypeVar("_Result")


class PatientCalls:
    """Makes calls one after another in one thread, so that the caller need not wait for one that
    hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._last: Future[Any] | None = None
        self._thread: threading.Thread | None = None

    def within(self, seconds: float, call: Callable[[], _Result]) -> _Result:
        """Return what a function returns. A function that hangs keeps the thread, and later ones
        are not called before it has returned.

        Raises:
            TimeoutError: it has not returned in time, or an earlier one has not returned yet.
        """
        if self._last is not None and not self._last.done():
            self._last.exception(seconds)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="lightning_3d-store", daemon=True
            )
            self._thread.start()
        done: Future[_Result] = Future()
        self._last = done
        self._calls.put((call, done))
        return done.result(seconds)

    def close(self) -> None:
        """Let the thread end after the call that it makes now."""
        self._calls.put(None)

    def _run(self) -> None:
        while (one := self._calls.get()) is not None:
            call, done = one
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)
