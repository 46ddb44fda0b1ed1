"""How much of the machine a measurement had to itself. Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

LEAST_SHARE = 0.9
MOST_WAITING = 0.5
SETTLE = 0.1
"""Seconds until a process that was told to stop counts as stopped: many threads do not see the
signal at once."""


@dataclass(frozen=True)
class Load:
    """What other processes did during a measurement.

    Attributes:
        share: processor time of the measurement, as a fraction of that of all processes; 1.0:
            nothing else ran.
        waiting: other processes that ran or waited for a core, on average over looks at the machine
            while the measurement paused.
    """

    share: float
    waiting: float

    @property
    def too_busy(self) -> bool:
        """True if step times say more about the other processes than about the contenders."""
        return self.share < LEAST_SHARE or self.waiting > MOST_WAITING

    def __str__(self) -> str:
        return (
            f"own share of the processor time {self.share:.0%}, {self.waiting:.1f} other processes"
            " in the run queue"
        )


class LoadMeter:
    """Measures the load from `start` on.

    Args:
        processes: ids of the measured processes; this one belongs to them, and so do children that
            they have waited for.
        proc: where the kernel shows its numbers.
    """

    def __init__(self, processes: Iterable[int], proc: Path = Path("/proc")) -> None:
        self._processes, self._proc = (os.getpid(), *processes), proc
        self._queue: list[int] = []
        self._all, self._own = self._ticks()

    def look(self) -> None:
        """Count the processes in the run queue. Call it just after the measured processes were told
        to stop: they are given time to."""
        time.sleep(SETTLE)
        counts = [
            line.split()[1]
            for line in (self._proc / "stat").read_text().splitlines()
            if line.startswith("procs_running ")
        ]
        self._queue.append(max(0, int(counts[0]) - 1))  # without the one that is looking

    def read(self) -> Load:
        """The load since the meter was made."""
        everything, own = self._ticks()
        busy = everything - self._all
        return Load(
            min(1.0, (own - self._own) / busy) if busy else 1.0,
            mean(self._queue) if self._queue else 0.0,
        )

    def _ticks(self) -> tuple[int, int]:
        """Clock ticks that all processes and the measured ones have used since they started."""
        user, nice, system, _, _, *interrupts = map(
            int, (self._proc / "stat").read_text().splitlines()[0].split()[1:9]
        )
        own = 0
        for process in self._processes:
            fields = (self._proc / str(process) / "stat").read_text().rpartition(")")[2].split()
            # utime, stime, and those of children that ended: fields 14 to 17 of proc(5)
            own += sum(map(int, fields[11:15]))
        return user + nice + system + sum(interrupts), own
