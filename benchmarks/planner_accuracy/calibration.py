"""How well the planner knows which layouts fit: the predicted probability next to the share of runs
that fit.

Every run is predicted with the spread (`memory_risk.SPREAD`) of the other half of the runs. A hash
of the settings decides the half, so that a run and its repetition are in the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean
from zlib import crc32

from benchmarks.planner_accuracy.allocator import allocated, queue_of
from benchmarks.planner_accuracy.published_runs import Run
from lightning_3d.app.planner.memory_risk import fit_probability, largest_share
from lightning_3d.app.planner.step_time import step_of
from lightning_3d.app.planner.tables import Table, table
from lightning_3d.errors import plural

_SMALL = 0.5
"""Share of a GPU below which no run fails for its memory: what fails there fails for another
reason."""

_SPREADS = [step / 100 for step in range(4, 41)]
_RISK = 0.1
_HEAD = (
    "predicted probability",
    "runs",
    "mean prediction",
    "share that ran",
    "of those that do not fail for another reason",
)
_TEXT = (
    (
        "Layouts of software and models of which some runs failed. The probability of a run comes"
        " from its predicted memory and the spread of"
    ),
    (
        "the other half of the runs, by a hash of its settings. Some runs fail for other reasons:"
        " of those that are predicted to need less"
    ),
    (
        "than half of a GPU, {failing:.1%} failed. The last column divides by the share of these"
        " that ran. Spreads of the two halves:"
    ),
    "{spreads}.",
)


@dataclass(frozen=True)
class Attempt:
    """A run, whether it ran, its predicted seconds, and the predicted share of a GPU's memory, if
    nothing must be given back."""

    run: Run
    ran: bool
    seconds: float
    share: float

    @property
    def half(self) -> int:
        job = self.run.job
        settings = (
            self.run.model,
            job.layout.name,
            job.layout.world_size,
            job.micro_batch,
            job.global_batch,
            job.seq,
            job.zero,
        )
        return crc32(repr(settings).encode()) % 2

    @property
    def cell(self) -> Hashable:
        job = self.run.job
        return (
            self.run.software.name,
            self.run.model,
            job.layout.world_size,
            job.seq,
            job.global_batch,
            job.precision,
        )


def attempts_of(runs: Sequence[Run], failed: Sequence[Run]) -> list[Attempt]:
    """Predict the runs that ran and those that failed, of the software and models of which some
    failed, with tp inside a node."""
    known = {(run.software.name, run.model) for run in failed}
    found = []
    for ran, group in ((True, runs), (False, failed)):
        for run in group:
            if (
                run.software.name,
                run.model,
            ) in known and run.job.layout.tp <= run.machine.gpus_per_node:
                step = step_of(run.job, run.machine, pipeline="estimate")
                total = allocated(run.job, queue=queue_of(step, run.job)).total
                found.append(Attempt(run, ran, step.seconds, total / run.machine.memory))
    return found


def spread_of(attempts: Sequence[Attempt]) -> float:
    """Return the spread with which what happened is most likely."""
    ran = _other_reasons(attempts)

    def surprise(spread: float) -> float:
        chances = [
            min(0.997, max(0.003, ran * fit_probability(one.share, 1.0, spread)))
            for one in attempts
        ]
        return -sum(
            log(chance if one.ran else 1 - chance)
            for one, chance in zip(attempts, chances, strict=True)
        )

    return min(_SPREADS, key=surprise)


def _other_reasons(attempts: Sequence[Attempt]) -> float:
    """Share of the runs with little memory that ran."""
    small = [one.ran for one in attempts if one.share < _SMALL]
    return fmean(small) if small else 1.0


def calibration(attempts: Sequence[Attempt]) -> list[str]:
    """Return the table of probabilities and the failures of first choices as lines of Markdown."""
    spreads = [spread_of([one for one in attempts if one.half != half]) for half in (0, 1)]
    ran = _other_reasons(attempts)
    chances = [(fit_probability(one.share, 1.0, spreads[one.half]), one) for one in attempts]
    text = "\n".join(_TEXT).format(
        failing=1 - ran, spreads=" and ".join(f"{spread:.2f}" for spread in spreads)
    )
    return [
        "## Does it fit?",
        "",
        text,
        "",
        *table(_HEAD, _deciles(chances, ran)),
        "",
        *_first_choices(attempts, spreads),
    ]


def _deciles(chances: Sequence[tuple[float, Attempt]], ran: float) -> Table:
    rows = []
    for decile in range(10):
        members = [(chance, one) for chance, one in chances if min(9, int(10 * chance)) == decile]
        if members:
            share = fmean(one.ran for _, one in members)
            cells = [
                str(len(members)),
                f"{fmean(chance for chance, _ in members):.0%}",
                f"{share:.0%}",
                f"{min(1.0, share / ran):.0%}",
            ]
            rows.append([f"{decile / 10:.1f} to {decile / 10 + 0.1:.1f}", *cells])
    return rows


def _first_choices(attempts: Sequence[Attempt], spreads: Sequence[float]) -> list[str]:
    """Count the layouts that would be proposed first and failed: the fastest of those that fit with
    90 %, by cell. In a cell in which nothing ran, no choice is better."""
    cells: dict[Hashable, list[Attempt]] = {}
    for one in attempts:
        if one.share <= largest_share(_RISK, spreads[one.half]):
            cells.setdefault(one.cell, []).append(one)
    ordered = [
        sorted(members, key=lambda one: one.seconds)
        for members in cells.values()
        if any(one.ran for one in members)
    ]
    first, three = (
        [members[0] for members in ordered],
        [one for members in ordered for one in members[:3]],
    )
    counts = [f"{sum(not one.ran for one in group)} of {len(group)}" for group in (first, three)]
    hopeless = [
        one.share
        for members in cells.values()
        if not any(one.ran for one in members)
        for one in members
    ]
    return [
        f"Of the layouts that are proposed first, {counts[0]} failed; of the first three of each"
        f" cell, {counts[1]}. Not counted are {plural(len(cells) - len(ordered), 'cell')} in which"
        f" every run that fits failed ({plural(len(hopeless), 'run')}, at most"
        f" {max(hopeless, default=0.0):.0%} of a GPU): another reason than memory."
    ]
