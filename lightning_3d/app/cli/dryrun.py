"""`lightning-3d dryrun`: run ranks of a job without its hardware, to show what they hold, send and
compute.

Takes the arguments of `lightning-3d train` and makes the same checks before torch is imported.
Writes only the files that options name.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.app.cli.options import Command
from lightning_3d.app.cli.output_file import output_file
from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.runs.check import check_shapes
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.options.precision import PRECISIONS
from lightning_3d.ranks.progress import task
from lightning_3d.storage.numbers import show_bytes, show_memory

if TYPE_CHECKING:
    from lightning_3d.app.dryrun.rank_report import RankReport
    from lightning_3d.app.dryrun.run import DryJob
    from lightning_3d.app.dryrun.timeline import Bar

COMMAND = Command(
    "dryrun",
    "Run ranks of a job without its hardware: their tensors have shapes but no values, and nothing"
    " is communicated. The ranks run the strategy and pipeline schedule of training. Prints what"
    " each rank holds, sends and computes in a training step. Needs neither the GPUs nor the data"
    " of the job, and writes only the files that you name.",
    examples=[
        "model=llama3_1_8b cluster=h100_1x8 parallelism=tp4_pp2 data.global_batch_size=64",
        "rank=0,7 --json dryrun.json parallelism=tp2_pp2_dp2",
    ],
)
COMMAND.option("--json", "FILE", "also write everything as JSON", type=output_file("--json"))
COMMAND.option(
    "--timeline",
    "FILE.svg",
    "also draw the timeline of the pipeline as SVG",
    type=output_file("--timeline"),
)
COMMAND.flag("--whole", "run every micro-batch of a step, including those that repeat earlier ones")
COMMAND.word("rank=N[,N...]", "global ranks to run; default: the first rank of each pipeline stage")


@dataclass(frozen=True)
class DryRunOptions:
    """The command line: options of this command, and the overrides of the run."""

    ranks: tuple[int, ...] | None
    json: Path | None
    timeline: Path | None
    whole: bool
    overrides: tuple[str, ...]


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, lambda options, words: _run(_options(options, words)))


def read_options(arguments: Sequence[str]) -> DryRunOptions:
    """Read a command line.

    Raises:
        ConfigError: an option does not exist, or has no value or a wrong one.
    """
    return _options(*COMMAND.parse(arguments))


def _options(options: Namespace, words: Sequence[str]) -> DryRunOptions:
    ranks = [_ranks(word.removeprefix("rank=")) for word in words if word.startswith("rank=")]
    overrides = tuple(word for word in words if not word.startswith("rank="))
    return DryRunOptions(
        ranks[-1] if ranks else None, options.json, options.timeline, options.whole, overrides
    )


def _ranks(value: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in value.split(",")))
    except ValueError:
        raise ConfigError(
            f"rank={value} must be a rank or a comma-separated list of ranks, for example rank=0,3."
        ) from None


def _run(options: DryRunOptions) -> int:
    config, plan = check_shapes(options.overrides)
    teacher = plan.run.objective.teacher_fields(plan.model["config"]["vocab_size"])
    layout = plan.layout
    for rank in options.ranks or ():
        if not 0 <= rank < layout.world_size:
            raise ConfigError(
                f"rank={rank} does not exist: {layout} has {layout.world_size} ranks, 0 to"
                f" {layout.world_size - 1}."
            )
    ranks = options.ranks or tuple(layout.group_of(0, "pp"))
    if plan.precision == "fp8":
        raise ConfigError(
            "precision=fp8 cannot be dry-run, because its matrix products need values, not only"
            " shapes. Use precision=bf16, which has the same parameters."
        )
    print(plan.describe(), flush=True)

    with task("importing torch and Transformers"):
        from lightning_3d.app.dryrun.run import dry_run
        from lightning_3d.app.dryrun.shapes import FoundResult

        job, found = job_of(config, plan, teacher, whole=options.whole), FoundResult()
    reports = []
    for rank in _last_first(ranks, layout):
        started = time.monotonic()
        reports.append(dry_run(job, rank, found))
        seconds = time.monotonic() - started
        print(
            f"rank {rank}: ran {reports[-1].micro_batches} of {plan.micro_batches} micro-batches in"
            f" {seconds:.1f} s",
            flush=True,
        )
    reports.sort(key=lambda report: report.rank)
    print(as_text(reports, plan, config))
    bars = timeline_of(job, reports)
    if bars is not None:
        from lightning_3d.app.dryrun.timeline import as_svg, idle
        from lightning_3d.app.dryrun.timeline import as_text as draw

        print(
            "\nTimeline of a step (the length of an action shows its number of operations); ranks"
            f" are idle {idle(bars):.1%} of the time"
        )
        print(draw(bars))
        if options.timeline is not None:
            options.timeline.write_text(as_svg(bars, plan.describe()))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(reports, plan, bars), indent=1) + "\n")
    return 0


def _last_first(ranks: Sequence[int], layout: Layout) -> list[int]:
    """Order ranks from the last stage to the first: later stages find out what earlier ones receive
    from them."""
    return sorted(ranks, key=lambda rank: -layout.coordinates(rank)["pp"])


def job_of(
    config: Mapping[str, Any],
    plan: RunPlan,
    teacher: Mapping[str, Any] | None = None,
    *,
    whole: bool = False,
) -> DryJob:
    """Build the job of a configuration. `teacher` has `model_type` and the fields of the
    teacher's."""
    import torch

    from lightning_3d.app.dryrun.run import DryJob, DryStrategy
    from lightning_3d.app.training.objective import make_module
    from lightning_3d.app.training.objects import strategy_class
    from lightning_3d.app.training.run import quiet

    quiet()
    arguments = {
        key: value for key, value in config["parallelism"].items() if not key.startswith("_")
    }
    arguments |= {"seed": config["seed"], "compile": False, "elastic": False}
    own = strategy_class(config["parallelism"]["_target_"])
    groups = {group: config[group] for group in ("optimizer", "objective")}

    def strategy(kind: type[DryStrategy]) -> DryStrategy:
        return type(own.__name__, (kind, own), {})(**arguments)

    def batch(micro_batches: int) -> dict[str, Any]:
        shape = (micro_batches * plan.micro_batch_size, config["data"]["sequence_length"])
        return {key: torch.zeros(shape, dtype=torch.int64) for key in plan.run.objective.batch_keys}

    return DryJob(
        module=lambda: make_module(
            {**groups, "model": {**config["model"], "pretrained": None}}, teacher
        ),
        strategy=strategy,
        batch=batch,
        layout=plan.layout,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        precision=PRECISIONS[plan.precision],
        clip=config["trainer"]["gradient_clip_val"],
        gpu=plan.accelerator == "gpu",
        average_decay=config["trainer"]["average_decay"],
        whole=whole,
    )


def timeline_of(job: DryJob, reports: Sequence[RankReport]) -> list[list[Bar]] | None:
    """Place the actions of all pipeline ranks in time, each as long as its measured operations;
    None unless every stage was run."""
    from lightning_3d.app.dryrun.timeline import place
    from lightning_3d.layout.pipeline_orders import training_order

    counted: dict[tuple[str, int], float] = {}
    for report in reports:
        for action, flops in report.flops.items():
            what = (action.kind.value, action.stage)
            counted[what] = max(counted.get(what, 0), flops)
    order = training_order(job.schedule, job.layout.pp, job.layout.vp, job.micro_batches)
    if any((letter, stage) not in counted for actions in order for stage, letter, _ in actions):
        return None
    return place(order, counted)


def axes_of(ranks: tuple[int, ...], layout: Layout) -> str:
    """Name a group of ranks by the axes along which they differ, joined by +."""
    places = [layout.coordinates(rank) for rank in ranks]
    differ = [axis for axis in layout.order if len({place[axis] for place in places}) > 1]
    return "+".join(differ) or "alone"


def as_text(reports: Sequence[RankReport], plan: RunPlan, config: Mapping[str, Any]) -> str:
    """Write the tables for the terminal."""
    from lightning_3d.app.dryrun.meter import CATEGORIES

    lines = [f"\nThe model has {reports[0].whole:,} parameters.{_about_second(reports, plan)}\n"]
    header = f"{'rank':>6} {'tp cp pp dp':>12} {'stages':>8} {'parameters':>14} {'memory':>10}"
    lines.append(header + "".join(f" {name:>13}" for name in CATEGORIES))
    for report in reports:
        place = " ".join(f"{report.coordinates[axis]:>2}" for axis in ("tp", "cp", "pp", "dp"))
        stages = ",".join(map(str, report.stages))
        start = (
            f"{report.rank:>6} {place:>12} {stages:>8} {report.parameters:>14,}"
            f" {show_memory(report.usage.peak_bytes):>10}"
        )
        lines.append(
            start + "".join(f" {show_memory(report.usage.peak[name]):>13}" for name in CATEGORIES)
        )
    memory = config["cluster"].get("memory")
    most = max(reports, key=lambda report: report.usage.peak_bytes)
    if memory:
        share, one = most.usage.peak_bytes / memory, show_memory(int(memory))
        lines.append(
            f"\nRank {most.rank} needs the most memory: {show_memory(most.usage.peak_bytes)},"
            f" {share:.0%} of the {one} of a GPU. Libraries and the allocator need some on top of"
            " that."
        )
    for report in reports:
        lines.append(
            f"\nRank {report.rank} in a step: {report.usage.flops:.4g} floating-point operations"
            " and these collectives:"
        )
        lines += _collective_lines(report, plan.layout)
    return "\n".join(lines)


def _about_second(reports: Sequence[RankReport], plan: RunPlan) -> str:
    """Say how large the frozen model of the objective is, where it is, and what a rank has of
    it."""
    name = plan.run.objective.second_model
    if name is None:
        return ""
    where = "every rank" if plan.layout.pp == 1 else "every rank of the last stage"
    whole, here = reports[0].second, max(report.second_here for report in reports)
    how = [f"tensor parallelism leaves {here:,} of them on each"] if 0 < here < whole else []
    how += ["ZeRO-3 shards it over the data-parallel ranks"] if plan.zero.stage == 3 else []
    return (
        f" The frozen {name} has {whole:,}. It is on {where}, and"
        f" {' and '.join(how) or 'it is not sharded'}."
    )


def _collective_lines(report: RankReport, layout: Layout) -> list[str]:
    rows: Counter[tuple[str, str, int]] = Counter()
    for call, count in report.usage.collectives.items():
        rows[axes_of(call.ranks, layout), call.name, call.bytes] += count
    ordered = sorted(rows.items(), key=lambda row: (row[0][0], -row[0][2] * row[1]))
    lines = [f"  {'group':<12} {'collective':<24} {'calls':>7} {'bytes each':>15} {'total':>12}"]
    for (axes, name, size), count in ordered:
        lines.append(
            f"  {axes:<12} {name:<24} {count:>7} {size:>15,} {show_bytes(size * count):>12}"
        )
    return lines


def as_json(
    reports: Sequence[RankReport], plan: RunPlan, bars: Sequence[Sequence[Bar]] | None
) -> dict[str, Any]:
    """Return everything as plain values, for JSON."""
    return {
        "layout": plan.layout.name,
        "ranks": plan.layout.world_size,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "parameters": reports[0].whole,
        "second_model_parameters": reports[0].second,
        "reports": [
            {
                "rank": report.rank,
                "coordinates": dict(report.coordinates),
                "stages": list(report.stages),
                "parameters": report.parameters,
                "micro_batches_run": report.micro_batches,
                "flops": report.usage.flops,
                "peak_bytes": report.usage.peak_bytes,
                "peak": dict(+report.usage.peak),
                "between_steps": dict(+report.kept),
                "collectives": [
                    {"group": axes_of(call.ranks, plan.layout), "ranks": list(call.ranks)}
                    | {"name": call.name, "bytes": call.bytes, "count": count}
                    for call, count in sorted(report.usage.collectives.items(), key=str)
                ],
            }
            for report in reports
        ],
        "timeline": (
            None
            if bars is None
            else [
                [[bar.letter, bar.stage, bar.micro_batch, bar.start, bar.stop] for bar in rank]
                for rank in bars
            ]
        ),
    }
