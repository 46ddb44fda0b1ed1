"""How fast the same job is on fewer and on more nodes: the fastest layout of each size. Pure
Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_3d.app.config.run_config import CompleteRun
from lightning_3d.app.planner.advice import machine_of_run, plan
from lightning_3d.app.planner.machine import Machine
from lightning_3d.app.planner.search import Candidate
from lightning_3d.app.planner.tables import share_of_peak, table, tokens_per_second
from lightning_3d.errors import ConfigError, LayoutError, plural

MOST_GPUS = 65_536
"""Most GPUs that `scaling` searches layouts for."""

Series = dict[str, "list[Point]"]
"""Points by the names of `SERIES`, fewest GPUs first."""

SERIES = {
    "fixed": "the same global batch",
    "proportional": "global batch in proportion to the {unit}s",
}
"""What changes with the number of GPUs, by the names in plan.json; `{unit}` stands for
`Machine.unit`."""


@dataclass(frozen=True)
class Point:
    """The fastest layout on some GPUs.

    Attributes:
        gpus: number of GPUs.
        global_batch: sequences of a step.
        best: the fastest candidate. None: no layout fits, or none divides the batch.
        machine: the cluster, whose GPUs these are.
    """

    gpus: int
    global_batch: int
    best: Candidate | None
    machine: Machine

    @property
    def rate(self) -> float | None:
        """Tokens per second of one GPU."""
        return None if self.best is None else tokens_per_second(self.best) / self.gpus

    @property
    def mfu(self) -> float | None:
        """Share of the peak, 0 to 1; see `share_of_peak`."""
        return None if self.best is None else share_of_peak(self.best, self.gpus, self.machine)


def node_counts(nodes: int, gpus_per_node: int, most_gpus: int, unit: str = "GPU") -> list[int]:
    """Return 1, 2, 4, ... nodes with at most `most_gpus` GPUs, and the cluster's own number of
    nodes.

    Raises:
        ConfigError: one node has more GPUs, or `most_gpus` is too large.
    """
    if not gpus_per_node <= most_gpus <= MOST_GPUS:
        raise ConfigError(
            f"--scaling must be at least the {plural(gpus_per_node, unit)} of a node and at most"
            f" {MOST_GPUS}; got {most_gpus}. For example --scaling {max(1024, gpus_per_node)}."
        )
    powers = (2**power for power in range((most_gpus // gpus_per_node).bit_length()))
    return sorted({*powers, nodes})


def scaling(run: CompleteRun, precision: str, most_gpus: int) -> Series:
    """Find the fastest layout for each size of the cluster, with a fixed global batch and with one
    in proportion to the GPUs.

    Args:
        run: the run; its cluster has the batch that it states.
        precision: name in `PRECISIONS`.
        most_gpus: GPUs of the largest size.

    Returns:
        Points by the names of `SERIES`, fewest GPUs first. Sizes whose proportional batch is not a
        whole number are left out.

    Raises:
        ConfigError: see `node_counts`; unknown GPUs or an unknown model family.
    """
    machine = machine_of_run(run)
    if machine is None:
        plan(run, precision)  # raises: the GPUs are unknown
    assert machine is not None
    nodes, batch = run.cluster.nodes, run.data["global_batch_size"]
    counts = node_counts(nodes, machine.gpus // nodes, most_gpus, machine.unit)
    found: dict[tuple[int, int], Point] = {}

    def point(count: int, sequences: int) -> Point:
        if (count, sequences) not in found:
            best = _fastest(run, precision, count, sequences)
            found[count, sequences] = Point(count * machine.gpus // nodes, sequences, best, machine)
        return found[count, sequences]

    return {
        "fixed": [point(count, batch) for count in counts],
        "proportional": [
            point(count, batch * count // nodes) for count in counts if batch * count % nodes == 0
        ],
    }


def _fastest(run: CompleteRun, precision: str, nodes: int, batch: int) -> Candidate | None:
    data = {**run.data, "global_batch_size": batch}
    try:
        return plan(
            replace(run, cluster=replace(run.cluster, nodes=nodes), data=data), precision, most=1
        ).best[0]
    except LayoutError:
        return None


def efficiencies(points: Sequence[Point]) -> list[float | None]:
    """Return tokens per second of one GPU, divided by those of the fewest GPUs on which a layout
    fits; None where none fits."""
    first = next((point.rate for point in points if point.rate is not None), None)
    return [None if point.rate is None or first is None else point.rate / first for point in points]


def scaling_tables(series: Series, unit: str = "GPU") -> str:
    """Return a Markdown table for each series.

    Args:
        unit: word for a GPU, as in `Machine`.
    """
    head = [f"{unit}s", "global batch", "layout", "s/step", "tokens/s", "MFU", "efficiency"]
    parts = [
        f"Scaling with {words.format(unit=unit)}:\n"
        + "\n".join(table(head, list(_rows(series[name]))))
        for name, words in SERIES.items()
        if series[name]
    ]
    note = (
        f"Efficiency: tokens/s of one {unit}, compared with the fewest {unit}s on which a layout"
        " fits."
    )
    return "\n\n".join([*parts, note])


def _rows(points: Sequence[Point]) -> Iterator[list[str]]:
    for point, efficiency in zip(points, efficiencies(points), strict=True):
        sizes = [f"{point.gpus:,}", f"{point.global_batch:,}"]
        if point.best is None or efficiency is None:
            yield [*sizes, "no layout fits", "-", "-", "-", "-"]
        else:
            name, seconds, speed = (
                point.best.job.layout.name,
                point.best.step.seconds,
                tokens_per_second(point.best),
            )
            yield [
                *sizes,
                name,
                f"{seconds:.3g}",
                f"{speed:,.0f}",
                f"{point.mfu:.0%}",
                f"{efficiency:.0%}",
            ]


def scaling_data(series: Series) -> dict[str, list[dict[str, Any]]]:
    """Return the points as plain values for JSON; `layout`, `seconds`, `mfu` and `efficiency` are
    null where no layout fits."""
    return {
        name: [
            {
                "gpus": point.gpus,
                "global_batch_size": point.global_batch,
                "layout": point.best and point.best.job.layout.name,
                "seconds": point.best and point.best.step.seconds,
                "mfu": point.mfu,
                "efficiency": efficiency,
            }
            for point, efficiency in zip(points, efficiencies(points), strict=True)
        ]
        for name, points in series.items()
    }
