"""The report of `python -m benchmarks.planner_accuracy`: predictions next to measured values."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from benchmarks.planner_accuracy.comparison import Comparison, compare, quantile
from benchmarks.planner_accuracy.growth import growth
from benchmarks.planner_accuracy.polling import polling
from benchmarks.planner_accuracy.published_runs import read_runs
from lightning_3d.app.planner.architecture import Architecture
from lightning_3d.app.planner.tables import Table, table
from lightning_3d.errors import plural

_CONTRADICTIONS = (
    "## Runs that contradict each other",
    "",
    (
        "Each pair is two runs with tp <= 8 that differ only in the model. One model has at least"
        " twice the parameters of the other, and"
    ),
    (
        "none of its sizes is smaller. The run with the larger model does more work, so it should"
        " take longer. `reversed` counts pairs in"
    ),
    (
        "which it was measured to be faster. `larger / smaller` is the median ratio of the seconds"
        " of the two runs. `over 2x` is the"
    ),
    "share of all runs on this number of GPUs that took more than twice the predicted time.",
    "",
)
_PAIRS = (
    "software",
    "GPUs",
    "pairs",
    "reversed",
    "larger / smaller: measured",
    "predicted",
    "over 2x",
)

_POLLING = (
    "## Pipelines that sleep between messages",
    "",
    (
        "This table has nanotron's pipelines with tp <= 8. Some of the runs used a version of"
        " nanotron that waits for messages by"
    ),
    (
        "sleeping for 0.1 s at a time, twice for each tensor"
        " (`benchmarks/planner_accuracy/polling.py`). Each run therefore has two"
    ),
    (
        "predictions, with and without this sleep. `sleeping` counts the runs whose measured time"
        " is closer to the prediction with sleep."
    ),
    (
        "`their error` is the median error of these runs, and `error of the others` that of the"
        " remaining runs. Both use the closer"
    ),
    "prediction.",
    "",
)
_POLLED = (
    "GPUs",
    "runs",
    "sleeping",
    "their error",
    "error of the others",
    "error of all, without sleeping",
)

_TITLE = """\
# How good the planner's predictions are

`python -m benchmarks.planner_accuracy FILE.csv` writes this report. It compares predictions of the planner with measured runs.
The first part uses the constants in `lightning_3d/app/planner/constants.py` and `benchmarks/planner_accuracy/software.py`. With
`--folds N`, the report has a second part. There, the runs of each model on each number of GPUs are predicted with constants that were
calibrated without these runs (cross-validation with N folds).

"""  # noqa: E501

_TIME, _MEMORY = (
    ("step time: rows", "median", "mean", "p90", "under"),
    ("memory: rows", "median", "mean", "p90", "p95", "under"),
)
_HEAD = ("source", "GPU", "rows", *_TIME, *_MEMORY)


def choices(compared: Sequence[Comparison]) -> list[tuple[str, str, int, int, int, float]]:
    """Return for every cell with several timed layouts (software, model, tokens of a sequence,
    GPUs, layouts, score). The score is measured tokens/s of the layout that is predicted to fit and
    to be fastest, divided by the most tokens/s that were measured."""
    cells: dict[tuple[str, str, int, int], list[Comparison]] = {}
    for one in compared:
        if one.measured_rate is not None:
            job = one.run.job
            cells.setdefault(
                (one.run.software.name, one.run.model, job.seq, job.layout.world_size), []
            ).append(one)
    found = []
    for cell, members in sorted(cells.items()):
        if len(members) > 1:
            fitting = [one for one in members if one.roomy <= one.run.machine.memory] or members
            chosen = max(fitting, key=lambda one: one.predicted_rate)
            best = max(one.measured_rate or 0.0 for one in members)
            found.append((*cell, len(members), (chosen.measured_rate or 0.0) / best))
    return found


def evaluate(path: Path, folds: int = 0) -> str:
    """Return the report on a file as Markdown: with the constants as they are, and with `folds` > 1
    also with constants that were calibrated without the cells that they predict.

    Raises:
        ConfigError: the file is missing, or has no columns of measured runs; fewer cells than
            folds.
    """
    from benchmarks.planner_accuracy.fit import cross_validate

    runs, skipped = read_runs(path)
    compared = [compare(run) for run in runs]
    counted = (
        f"{len(runs)} runs are predicted; {skipped} are not, because their layout or type of GPU is"
        " not stated."
    )
    text = f"{_TITLE}{in_short(compared)}\n\n{counted}\n\n{report(compared)}"
    if folds:
        held = cross_validate(runs, folds, compare)
        text += (
            f"\n# With constants that were calibrated without the predicted runs ({folds}"
            f" folds)\n\n{report(held)}"
        )
    return text


def plain(path: Path, failed: Path | None = None) -> str:
    """Return the tables of all runs, for known and for unknown software, and the calibration of the
    memory if there are failed runs.

    Raises:
        ConfigError: a file is missing, or has no columns of measured runs.
    """
    from benchmarks.planner_accuracy.calibration import attempts_of, calibration
    from benchmarks.planner_accuracy.fit import leave_out
    from benchmarks.planner_accuracy.yardstick import judge, yardstick

    runs, _ = read_runs(path)
    lines = yardstick(judge([compare(run) for run in runs], leave_out(runs, compare)))
    if failed is not None:
        lines += calibration(attempts_of(runs, read_runs(failed)[0]))
    return "\n".join(lines).rstrip() + "\n"


def in_short(compared: Sequence[Comparison]) -> str:
    """Return the results in three lines, for readers who want no table."""
    usual = [one for one in compared if one.run.core and one.run.mfu is not None]
    scores = [cell[-1] for cell in choices(compared)]
    lines = [
        "In short, for `core` runs, whose settings are useful (tp <= 8, MFU of at least 20 %):",
        "",
    ]
    for what, errors in (
        ("step time", [one.time_error for one in usual]),
        ("memory", [one.memory_error for one in usual]),
    ):
        known = [error for error in errors if error is not None]
        if known:
            lines.append(
                f"- The median error of the predicted {what} is {quantile(known, 0.5):.1%}, and one"
                f" run in ten is off by more than {quantile(known, 0.9):.1%}"
                f" ({plural(len(known), 'run')})."
            )
    if scores:
        good = sum(score >= 0.9 for score in scores)
        lines.append(
            f"- In {good} of {plural(len(scores), 'cell')}, the layout that the planner chooses was"
            " measured to reach at least 90 % of the\n  best measured speed. The worst one reaches"
            f" {min(scores):.0%} ([why](nanotron.md#runs-on-512-gpus))."
        )
    return "\n".join(lines)


def report(compared: Sequence[Comparison]) -> str:
    """Tables of errors by source and type of GPU, of choices by cell."""
    lines = [
        "## Errors",
        "",
        (
            "An error is |predicted - measured| / measured. `under` is the share of rows whose"
            " prediction is too small. A row is one run."
        ),
        "",
        *table(_HEAD, _errors(compared)),
        "",
        (
            "`core` means rows with tp <= 8 and a stated MFU (model FLOP/s utilization) of at least"
            " 20 %."
        ),
        "",
        "## Choices",
        "",
        (
            "Here, a cell is one model with one sequence length on one number of GPUs. In each"
            " cell, the planner chooses the layout that it predicts to be the fastest of those that"
            " fit. `score` is the measured tokens/s of this choice, divided by the best measured"
            " tokens/s."
        ),
        "",
    ]
    found, slow = choices(compared), slow_shares(compared)
    for software in dict.fromkeys(cell[0] for cell in found):
        cells = [cell for cell in found if cell[0] == software]
        scores = [cell[-1] for cell in cells]
        lines += [f"{software}: {_scores(scores)}", ""]
        usual = [cell[-1] for cell in cells if slow.get((software, cell[3]), 0.0) <= 0.5]
        if 0 < len(usual) < len(cells):
            lines += [
                (
                    "Without the numbers of GPUs on which most runs took more than twice the"
                    f" predicted time: {_scores(usual)}"
                ),
                "",
            ]
        rows = [
            [model, str(seq), str(gpus), str(count), f"{score:.3f}"]
            for _, model, seq, gpus, count, score in cells
        ]
        lines += [*table(["model", "tokens", "GPUs", "layouts", "score"], rows), ""]
    lines += growth([one for one in compared if slow.get(_where(one), 0.0) <= 0.5])
    pairs, pipelines = contradictions(compared), polling(compared)
    if pairs:
        lines += [*_CONTRADICTIONS, *table(_PAIRS, pairs), ""]
    if pipelines:
        lines += [*_POLLING, *table(_POLLED, pipelines)]
    return "\n".join(lines).rstrip() + "\n"


def _scores(scores: Sequence[float]) -> str:
    return (
        f"median {quantile(scores, 0.5):.3f}, worst {min(scores):.3f},"
        f" {plural(len(scores), 'cell')}"
    )


def slow_shares(compared: Sequence[Comparison]) -> dict[tuple[str, int], float]:
    """Return by software and number of GPUs the share of runs with tp <= 8 that took more than
    twice the predicted time."""
    slow: dict[tuple[str, int], list[bool]] = {}
    for one in compared:
        if one.run.seconds is not None and one.run.job.layout.tp <= 8:
            slow.setdefault(_where(one), []).append(one.run.seconds > 2 * one.seconds)
    return {where: sum(found) / len(found) for where, found in slow.items()}


def _where(one: Comparison) -> tuple[str, int]:
    return one.run.software.name, one.run.job.layout.world_size


def contradictions(compared: Sequence[Comparison]) -> Table:
    """Pairs of runs that are alike in everything but the model, of which one is larger, by software
    and number of GPUs."""
    alike: dict[tuple[object, ...], list[Comparison]] = {}
    for one in compared:
        job = one.run.job
        if one.run.seconds is not None and job.layout.tp <= 8:
            settings = (
                job.seq,
                job.global_batch,
                job.micro_batch,
                job.zero,
                job.precision,
                job.recompute,
                job.schedule,
            )
            alike.setdefault(
                (one.run.software.name, one.run.gpu, job.layout, *settings), []
            ).append(one)
    ratios: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for members in alike.values():
        for small, large in permutations(members, 2):
            if _larger(large.run.job.model, small.run.job.model):
                measured = (large.run.seconds or 0.0) / (small.run.seconds or 1.0)
                ratios.setdefault(_where(small), []).append(
                    (measured, large.seconds / small.seconds)
                )
    rows, slow = [], slow_shares(compared)
    for where, pairs in sorted(ratios.items()):
        measured_ratios, predicted_ratios = zip(*pairs, strict=True)
        medians = [f"{quantile(values, 0.5):.2f}" for values in (measured_ratios, predicted_ratios)]
        reversed_pairs = sum(ratio < 1 for ratio in measured_ratios)
        rows.append(
            [
                where[0],
                str(where[1]),
                str(len(pairs)),
                str(reversed_pairs),
                *medians,
                f"{slow[where]:.0%}",
            ]
        )
    return rows


def _larger(large: Architecture, small: Architecture) -> bool:
    sizes = [
        (model.layers, model.hidden, model.ffn, model.vocab, model.heads)
        for model in (large, small)
    ]
    return large.parameters >= 2 * small.parameters and all(
        a >= b for a, b in zip(*sizes, strict=True)
    )


def _errors(compared: Sequence[Comparison]) -> Table:
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for one in compared:
        groups.setdefault((short(one.run.source), one.run.gpu), []).append(one)
        if one.run.core and one.run.mfu is not None:
            groups.setdefault((short(one.run.source) + ", core", one.run.gpu), []).append(one)
    return [_row(source, gpu, members) for (source, gpu), members in groups.items()]


def short(source: str) -> str:
    """Return a source without its part in brackets."""
    return source.partition(" (")[0]


def _row(source: str, gpu: str, members: Sequence[Comparison]) -> list[str]:
    time = [one.time_error for one in members if one.time_error is not None]
    memory = [one.memory_error for one in members if one.memory_error is not None]
    return [source, gpu, str(len(members)), *_summary(time, (0.9,)), *_summary(memory, (0.9, 0.95))]


def _summary(errors: Sequence[float], shares: Sequence[float]) -> list[str]:
    if not errors:
        return ["0"] + ["-"] * (3 + len(shares))
    mean = sum(map(abs, errors)) / len(errors)
    values = [
        quantile(errors, 0.5),
        mean,
        *(quantile(errors, share) for share in shares),
        sum(error < 0 for error in errors) / len(errors),
    ]
    return [str(len(errors)), *(f"{value:.1%}" for value in values)]
