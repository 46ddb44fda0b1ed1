"""A self-test: all cells one after the other on the same workers, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_3d.app.selftest import rank
from lightning_3d.app.selftest.cells import KERNEL, Cell
from lightning_3d.app.selftest.judge import (
    FAILED,
    HANGS,
    NOT_REACHED,
    SKIPPED,
    Verdict,
    compare,
    judge,
)
from lightning_3d.app.selftest.machine import absent_parts, describe
from lightning_3d.app.selftest.models import Recipe, Result
from lightning_3d.app.selftest.workers import CallFailed, CallHung, Workers
from lightning_3d.ranks.progress import task


@dataclass(frozen=True)
class Session:
    """Finished self-test: a description of the machine, and the verdict on each cell."""

    machine: dict[str, Any]
    verdicts: list[Verdict]


def run(
    cells: Sequence[Cell],
    ranks: int,
    gpus: int,
    seconds: float,
    prepare: Callable[[], None] | None = None,
) -> Session:
    """Run the cells.

    Args:
        ranks: number of ranks. gpus: number of GPUs that they use; 0: CPU ranks. With more ranks
            than GPUs, ranks share GPUs.
        seconds: time limit of all cells, the start of the workers included. A cell is not started
            after it.
        prepare: function that each worker calls when it starts.

    Raises:
        CallFailed: the workers did not start.
    """
    deadline = time.monotonic() + seconds
    accelerator = "gpu" if gpus else "cpu"
    with Workers(ranks, gpus, prepare) as workers:
        with task(f"starting {ranks} ranks"):
            machine = workers.call(describe, 1, 120.0, accelerator)[0] | {
                "ranks": ranks,
                "gpus": gpus,
            }
        verdicts, references = [], _References(workers, accelerator)
        with task("comparing", len(cells), "cells") as advance:
            for cell in cells:
                verdicts.append(
                    _verdict(cell, ranks, machine, workers, references, deadline, accelerator)
                )
                advance(1)
    return Session(machine, verdicts)


class _References:
    """Results of the plain loop, each computed once by the worker of rank 0."""

    def __init__(self, workers: Workers, accelerator: str) -> None:
        self._workers, self._accelerator = workers, accelerator
        self._known: dict[Recipe, Result] = {}

    def get(self, recipe: Recipe, seconds: float) -> Result:
        if recipe not in self._known:
            self._known[recipe] = self._workers.call(
                rank.reference, 1, seconds, recipe, self._accelerator
            )[0]
        return self._known[recipe]


def _verdict(
    cell: Cell,
    ranks: int,
    machine: dict[str, Any],
    workers: Workers,
    references: _References,
    deadline: float,
    accelerator: str,
) -> Verdict:
    capability = tuple(machine["capability"]) if machine["capability"] else None
    if why := cell.missing(ranks, capability, absent_parts()):
        return Verdict(cell, SKIPPED, why=why)
    left = deadline - time.monotonic()
    if left <= 0:
        return Verdict(cell, NOT_REACHED, why="time is over; use a larger --minutes")
    started, limit = time.monotonic(), min(cell.seconds, max(left, 1.0))
    try:
        verdict = _compare(cell, workers, references, limit, accelerator)
    except CallFailed as error:
        verdict = Verdict(cell, FAILED, why=_last_line(str(error)), trace=str(error))
    except CallHung as error:
        cut_short = limit < cell.seconds
        why = (
            "the time limit ended it; use a larger --minutes"
            if cut_short
            else f"no answer within {limit:.0f} s"
        )
        verdict = Verdict(cell, NOT_REACHED if cut_short else HANGS, why=why, trace=str(error))
    return replace(verdict, seconds=time.monotonic() - started)


def _compare(
    cell: Cell, workers: Workers, references: _References, limit: float, accelerator: str
) -> Verdict:
    folder = workers.folder / f"cell_{time.monotonic_ns()}"
    if cell.kind == KERNEL:
        differences = workers.call(rank.attention, 1, limit, cell, accelerator, str(folder))[0]
        return Verdict(cell, judge(cell, differences), differences)
    reference = references.get(rank.recipe_of(cell), limit)
    return compare(
        cell, workers.call(rank.train, cell.ranks, limit, cell, accelerator, str(folder)), reference
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was reported"
