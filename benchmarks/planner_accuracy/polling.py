"""Pipelines whose hosts check for messages every 0.1 s. Pure Python.

nanotron's branch `nouamane/bench2` (commit 67c5ebb6, `parallel/pipeline_parallel/p2p.py`), which
has the script of the sweep, sends two messages with the shape of a tensor before the tensor, and
waits for each on both sides by sleeping for 0.1 s until it is complete. For each micro-batch two
tensors go forward, hidden states and the mask, and one comes back. The later script on the main
branch (`scripts/scaling_benchmarks.py`) runs pipelines again whose job is older than a given one; a
table of runs does not say which are which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from statistics import median
from typing import TYPE_CHECKING

from lightning_3d.app.planner.block_costs import work_of
from lightning_3d.app.planner.step_time import stage_seconds, step_of
from lightning_3d.app.planner.timeline import play
from lightning_3d.layout.pipeline_orders import training_order

if TYPE_CHECKING:
    from benchmarks.planner_accuracy.comparison import Comparison
    from benchmarks.planner_accuracy.published_runs import Run

_SLEEP = 0.1
_FORWARD, _BACKWARD = 4 * _SLEEP, 2 * _SLEEP
"""Seconds of the messages before two tensors, and before one, with one neighbour."""


def polled_seconds(run: Run) -> float:
    """Predict the seconds of a step if a rank sleeps for every message before a tensor. Its sender
    and receiver sleep at the same time."""
    job, layout = run.job, run.job.layout
    work = work_of(job, run.machine)
    seconds = stage_seconds(job, run.machine, work)
    last = len(seconds) - 1
    slow = []
    for index, stage in enumerate(seconds):
        neighbours = (index > 0) + (index < last)
        slow.append(
            replace(
                stage,
                forward=stage.forward + _FORWARD * neighbours,
                backward=stage.backward + _BACKWARD * neighbours,
            )
        )
    order = training_order(job.schedule, layout.pp, layout.vp, job.micro_batches)
    span = play(order, slow, work.message - _FORWARD, back=work.message - _BACKWARD).seconds
    usual = step_of(job, run.machine)
    return span + usual.data + usual.optimizer + job.stack.host.step


def polling(compared: Sequence[Comparison]) -> list[list[str]]:
    """Return by number of GPUs, for nanotron's pipelines with tp <= 8: runs, those whose seconds
    are nearer to `polled_seconds` than to the usual prediction, and the median error of these and
    of the others, each against its own prediction."""
    found: dict[int, list[tuple[float, float]]] = {}
    for one in compared:
        layout = one.run.job.layout
        if (
            one.run.seconds
            and one.run.software.name == "nanotron"
            and layout.pp > 1
            and layout.tp <= 8
        ):
            ratios = polled_seconds(one.run) / one.run.seconds, one.seconds / one.run.seconds
            found.setdefault(layout.world_size, []).append(ratios)
    rows = []
    for gpus, pairs in sorted(found.items()):
        slow = [polled for polled, usual in pairs if abs(log(polled)) < abs(log(usual))]
        rest = [usual for polled, usual in pairs if abs(log(polled)) >= abs(log(usual))]
        rows.append(
            [
                str(gpus),
                str(len(pairs)),
                str(len(slow)),
                _median(slow),
                _median(rest),
                _median([usual for _, usual in pairs]),
            ]
        )
    return rows


def _median(ratios: Sequence[float]) -> str:
    return f"{median(abs(ratio - 1) for ratio in ratios):.1%}" if ratios else "-"
