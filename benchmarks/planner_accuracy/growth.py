"""What more data-parallel ranks cost: runs that differ only in the number of GPUs and in their
share of the batch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from benchmarks.planner_accuracy.comparison import Comparison
from lightning_3d.app.planner.tables import Table, table
from lightning_3d.layout.layout import Layout

LARGE = 512
"""Least number of GPUs of the largest run of a series."""

_TEXT = (
    "## More data-parallel ranks",
    "",
    (
        "Runs with the same layout on more GPUs, which all are data-parallel ranks: the loss of"
        " speed of a GPU (tokens/s) between the smallest"
    ),
    (
        f"number of GPUs and another. The largest number of a series is at least {LARGE}. `batch`:"
        " the global batch is the `same` for all"
    ),
    (
        "numbers of GPUs, or `grows` with them. `messages`: predicted share of a step in which GPUs"
        " wait for messages, but for those of"
    ),
    (
        "pipelines. Numbers of GPUs on which most runs of a software took more than twice the"
        " predicted time are left out."
    ),
    "",
)
_HEAD = (
    "source",
    "model",
    "layout",
    "ZeRO",
    "batch",
    "GPUs",
    "measured loss",
    "predicted loss",
    "messages",
)


def growth(compared: Sequence[Comparison]) -> list[str]:
    """Return the table as lines of Markdown; no lines if there are no such runs."""
    rows = growth_rows(compared)
    return [*_TEXT, *table(_HEAD, rows), ""] if rows else []


def growth_rows(compared: Sequence[Comparison]) -> Table:
    """Return the rows of the table, by series and number of GPUs."""
    rows = []
    for (source, model, layout, zero, batch), members in _series(compared).items():
        first, *others = [members[size] for size in sorted(members)]
        for one in others:
            measured = 1 - (one.measured_rate or 0.0) / (first.measured_rate or 1.0)
            predicted = 1 - one.predicted_rate / first.predicted_rate
            sizes = f"{first.run.job.layout.world_size} to {one.run.job.layout.world_size}"
            rows.append(
                [
                    source,
                    model,
                    layout,
                    zero,
                    batch,
                    sizes,
                    f"{measured:.0%}",
                    f"{predicted:.0%}",
                    f"{one.waiting:.0%}",
                ]
            )
    return rows


def _series(
    compared: Sequence[Comparison],
) -> dict[tuple[str, str, str, str, str], dict[int, Comparison]]:
    """Return the runs of each series by number of GPUs, of those with the same settings the
    fastest."""
    groups: dict[tuple[tuple[str, str, str, str, str], Hashable], dict[int, Comparison]] = {}
    for one in compared:
        run, job, size = one.run, one.run.job, one.run.job.layout.world_size
        if one.measured_rate is None:
            continue
        for batch, amount in (("same", job.global_batch), ("grows", job.global_batch / size)):
            name = (
                run.source.partition(" (")[0].partition(" scripts/")[0],
                run.model,
                _without_dp(job.layout),
                str(job.zero),
                batch,
            )
            known = groups.setdefault(
                (name, (run.table, amount, job.seq, job.precision, run.software)), {}
            )
            if size not in known or (known[size].run.seconds or 0.0) > (one.run.seconds or 0.0):
                known[size] = one
    return {
        name: members
        for (name, _), members in groups.items()
        if len(members) > 1 and max(members) >= LARGE
    }


def _without_dp(layout: Layout) -> str:
    """Return the name of a layout without dp, or "dp" if it has nothing else."""
    return "_".join(part for part in layout.name.split("_") if not part.startswith("dp")) or "dp"
