"""The plain tables of the report: all timed runs with tp inside a node, by source, kind of model
and precision, next to two baselines.

Every run has a prediction for software that is known, and one for software that is not
(`fit.leave_out`): with constants that were calibrated without all runs of this software. The
baselines are a constant MFU for each type of GPU, which is the median of other software, and the
least tp * pp that fits.

A cell of choice is one software, model, number and type of GPUs, sequence length, global batch and
precision.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeVar

from benchmarks.planner_accuracy.comparison import Comparison, quantile
from benchmarks.planner_accuracy.published_runs import Run
from benchmarks.planner_accuracy.software import family
from lightning_3d.app.config.plan import MEMORY_RISK
from lightning_3d.app.planner.memory_risk import largest_share
from lightning_3d.app.planner.tables import Table, table

Key = TypeVar("Key", bound=Hashable)

_HEAD = (
    *(
        "rows of",
        "model",
        "precision",
        "rows",
        "seen: median",
        "p90",
        "too fast",
        "unseen: median",
        "p90",
        "too fast",
    ),
    *("constant MFU: median", "p90"),
)
_CHOICES = (
    *(
        "cells of",
        "model",
        "precision",
        "cells",
        "seen: mean",
        "worst",
        "best of 3",
        "unseen: mean",
        "best of 3",
    ),
    *("least tp x pp", "mean of all that fit"),
)

_TEXT = (
    (
        "An error is |predicted - measured| / measured seconds of a step. Rows are all timed runs"
        " with tp inside a node, also slow ones."
    ),
    (
        "`seen`: with the constants of the run's software. `unseen`: with constants that were"
        " calibrated without any run of this software."
    ),
    (
        "`too fast`: share of rows whose prediction is too small. `constant MFU`: one MFU for each"
        " type of GPU, the median of other software,"
    ),
    (
        "each with the median of its runs. `(1)`: tables that do not state the micro-batch, which"
        " is taken as 1."
    ),
)
_CHOICE_TEXT = (
    (
        "A cell is one software, model, number and type of GPUs, sequence length, global batch and"
        " precision with several measured layouts."
    ),
    (
        "The score of a choice is its measured tokens/s divided by the best measured tokens/s of"
        " the cell. The planner chooses among layouts"
    ),
    (
        "that fit with 90 %. `best of 3`: the best of the three that are predicted to be the"
        " fastest. `least tp x pp`: of those that fit, the"
    ),
    (
        "one with the least tp x pp, and of these with the largest micro-batch. `mean of all that"
        " fit`: what a constant MFU gives, as it ranks"
    ),
    "all layouts alike.",
)


@dataclass(frozen=True)
class Judged:
    """A run, its two predictions, and the seconds of a step at a constant MFU."""

    seen: Comparison
    unseen: Comparison
    constant: float

    @property
    def run(self) -> Run:
        return self.seen.run

    @property
    def measured(self) -> float:
        return self.run.seconds or 0.0

    @property
    def group(self) -> tuple[str, str, str]:
        """(source, kind of model, precision)."""
        job = self.run.job
        source = self.run.source.partition(" (")[0] + " (1)" * self.run.assumed
        return (
            source,
            "mixture" if job.model.experts else "dense",
            job.precision if job.precision != "bf16" else "16 bits",
        )

    @property
    def cell(self) -> tuple[Hashable, ...]:
        run, job = self.run, self.run.job
        return (
            run.source,
            run.software.name,
            run.model,
            run.gpu,
            job.layout.world_size,
            job.seq,
            job.global_batch,
            job.precision,
        )


def judge(seen: Sequence[Comparison], unseen: Sequence[Comparison]) -> list[Judged]:
    """Join the two predictions of each timed run with tp inside a node.

    Args:
        seen: predictions with the constants of the runs' software.
        unseen: predictions of the same runs, in the same order, with constants for any software.
    """
    pairs = [(one, two) for one, two in zip(seen, unseen, strict=True) if _counts(one.run)]
    families = {family(one.run.software) for one, _ in pairs}
    shares = {
        name: _shares(
            [one.run for one, _ in pairs if family(one.run.software) != name or len(families) == 1]
        )
        for name in families
    }
    return [
        Judged(one, two, _at_full_speed(one.run) / shares[family(one.run.software)](one.run))
        for one, two in pairs
    ]


def _counts(run: Run) -> bool:
    return bool(run.seconds) and run.job.layout.tp <= run.machine.gpus_per_node


def _at_full_speed(run: Run) -> float:
    """Seconds of a step at an MFU of 1, of the peak in 16 bits."""
    job = run.job
    return (
        job.model.model_flops(job.seq)
        * job.global_batch
        * job.seq
        / job.layout.world_size
        / run.machine.peak
    )


def _shares(runs: Sequence[Run]) -> Callable[[Run], float]:
    """Return the median MFU of the type of a run's GPU, or of all types where no other software ran
    on it."""
    by_type = _grouped(runs, lambda run: run.machine.gpu.partition("_")[0])
    found = {kind: _middle(members) for kind, members in by_type.items()}
    return lambda run: found.get(run.machine.gpu.partition("_")[0]) or median(found.values())


def _middle(runs: Sequence[Run]) -> float:
    """Return the median over software of the median MFU of its runs, so that a sweep counts as
    one."""
    by_software = _grouped(runs, lambda run: family(run.software)).values()
    return median(
        median(_at_full_speed(run) / (run.seconds or 1.0) for run in members)
        for members in by_software
    )


def _grouped(items: Sequence, key: Callable[..., Key]) -> Mapping[Key, list]:
    found: dict[Key, list] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def yardstick(judged: Sequence[Judged]) -> list[str]:
    """Return the two tables as lines of Markdown."""
    errors, choices = (
        _by_group(judged, lambda one: one.group, _errors),
        _by_group(_cells(judged), lambda cell: cell[0].group, _scores),
    )
    return [
        *("## All runs", "", *_TEXT, "", *table(_HEAD, errors), ""),
        *(
            "## Choices between measured layouts",
            "",
            *_CHOICE_TEXT,
            "",
            *table(_CHOICES, choices),
            "",
        ),
    ]


def _by_group(
    items: Sequence,
    group: Callable[..., tuple[str, str, str]],
    row: Callable[[Sequence], list[str]],
) -> Table:
    """Return a row for every group, then for all sources together, by kind and precision."""
    groups = _grouped(items, group)
    rows = [[*name, *row(members)] for name, members in sorted(groups.items())]
    together = _grouped(items, lambda item: group(item)[1:])
    rows += [["all", *name, *row(members)] for name, members in sorted(together.items())]
    return [*rows, ["all", "all", "all", *row(items)]]


def _errors(members: Sequence[Judged]) -> list[str]:
    cells = [str(len(members))]
    for seconds in (lambda one: one.seen.seconds, lambda one: one.unseen.seconds):
        errors = [seconds(one) / one.measured - 1 for one in members]
        cells += [
            f"{quantile(errors, 0.5):.1%}",
            f"{quantile(errors, 0.9):.1%}",
            f"{fmean(error < 0 for error in errors):.0%}",
        ]
    errors = [one.constant / one.measured - 1 for one in members]
    return [*cells, f"{quantile(errors, 0.5):.1%}", f"{quantile(errors, 0.9):.1%}"]


def _cells(judged: Sequence[Judged]) -> list[list[Judged]]:
    """Return the runs of each cell with several layouts; of runs with the same settings the
    fastest."""
    cells = []
    for members in _grouped(judged, lambda one: one.cell).values():
        best: dict[Hashable, Judged] = {}
        for one in sorted(members, key=lambda one: one.measured):
            job = one.run.job
            best.setdefault(
                (
                    job.layout,
                    job.micro_batch,
                    job.zero,
                    job.recompute,
                    job.schedule,
                    one.run.software.name,
                ),
                one,
            )
        if len(best) > 1:
            cells.append(list(best.values()))
    return cells


def _scores(cells: Sequence[Sequence[Judged]]) -> list[str]:
    seen, unseen = (
        [_score(cell, lambda one: one.seen) for cell in cells],
        [_score(cell, lambda one: one.unseen) for cell in cells],
    )
    least = [_rates(cell)[id(min(_fitting(cell), key=_split))] for cell in cells]
    fitting = [fmean(_rates(cell)[id(one)] for one in _fitting(cell)) for cell in cells]
    first = [score for score, _ in seen]
    return [
        *(
            str(len(cells)),
            f"{fmean(first):.3f}",
            f"{min(first):.3f}",
            f"{fmean(three for _, three in seen):.3f}",
        ),
        *(
            f"{fmean(score for score, _ in unseen):.3f}",
            f"{fmean(three for _, three in unseen):.3f}",
        ),
        *(f"{fmean(least):.3f}", f"{fmean(fitting):.3f}"),
    ]


def _split(one: Judged) -> tuple[int, int]:
    job = one.run.job
    return job.layout.tp * job.layout.pp, -job.micro_batch


def _rates(cell: Sequence[Judged]) -> dict[int, float]:
    """Measured speed of each run of a cell, divided by the best one."""
    best = min(one.measured for one in cell)
    return {id(one): best / one.measured for one in cell}


def _fitting(cell: Sequence[Judged]) -> Sequence[Judged]:
    return [
        one for one in cell if one.seen.roomy <= largest_share(MEMORY_RISK) * one.run.machine.memory
    ] or cell


def _score(
    cell: Sequence[Judged], predicted: Callable[[Judged], Comparison]
) -> tuple[float, float]:
    """Return the scores of (the first choice, the best of the first three)."""
    rates, ordered = _rates(cell), sorted(_fitting(cell), key=lambda one: predicted(one).seconds)
    return rates[id(ordered[0])], max(rates[id(one)] for one in ordered[:3])
