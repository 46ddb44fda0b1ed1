"""Ways to run a job, as a search of the planner tries them."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_3d.app.planner.choices import Fixed, fitting, more_recomputed, ways
from lightning_3d.app.planner.job import Job
from lightning_3d.app.planner.rank_memory import RankMemory


def fits(job: Job, room: float, fixed: Fixed) -> Iterator[tuple[Job, RankMemory]]:
    """Yield a job that fits in `room` bytes with each useful ZeRO stage, with the least
    recomputation with which it does."""
    for each in ways(job, fixed):
        way: Job | None = each
        while way is not None and (found := fitting(way, room, fixed)) is None:
            way = more_recomputed(way, fixed)
        if way is not None:
            yield found
