"""`lightning-3d dryrun`: what the ranks of a job would hold, send and compute, found out without its hardware.

Takes the arguments of `lightning-3d train`, and refuses what it refuses before torch is imported. Nothing is written but what is asked for.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.cli.exit_codes import guarded
from lightning_3d.cli.output_file import check_output
from lightning_3d.compat.imports import quiet_imports
from lightning_3d.config.options.precision import PRECISIONS
from lightning_3d.config.plan_run import RunPlan
from lightning_3d.errors import ConfigError
from lightning_3d.layout.layout import Layout
from lightning_3d.runs.check import check_anywhere

if TYPE_CHECKING:
    from lightning_3d.dryrun.rank_report import RankReport
    from lightning_3d.dryrun.run import Job
    from lightning_3d.dryrun.timeline import Bar

USAGE = """\
lightning-3d dryrun [rank=N[,N...]] [--json FILE] [--timeline FILE.svg] [OVERRIDES]

Builds ranks of a job with tensors that have no values, through the strategy and the schedule of training, and says what each holds,
sends and computes in a training step. Needs neither the GPUs nor the data of the job. OVERRIDES are those of `lightning-3d train`.

  rank=N            global ranks to run; by default one of each pipeline rank
  --json FILE       also write everything as JSON
  --timeline FILE   also draw the timeline of the pipeline as SVG
  --whole           run every micro-batch of a step, also those that add nothing new
"""


@dataclass(frozen=True)
class Options:
    """The command line, without the overrides of the run."""

    ranks: tuple[int, ...] | None
    json: Path | None
    timeline: Path | None
    whole: bool
    overrides: tuple[str, ...]


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    if set(arguments) & {"--help", "-h"}:
        print(USAGE, end="")
        return 0
    return guarded(lambda: _run(read_options(arguments)), told=(OSError,))


def read_options(arguments: Sequence[str]) -> Options:
    """Take this command's own options out of a command line.

    Raises:
        ConfigError: one that it does not have, or without its value.
    """
    files: dict[str, Path | None] = {"--json": None, "--timeline": None}
    ranks, overrides, whole = None, [], False
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        if name in files:
            value = value or (rest.pop(0) if rest else "")
            if not value:
                raise ConfigError(f"{name} needs the name of a file.")
            files[name] = path = Path(value)
            check_output(path, name)
        elif name == "rank":
            ranks = _ranks(value)
        elif word == "--whole":
            whole = True
        elif word.startswith("-"):
            raise ConfigError(f"{name} is no option of a dry run. It takes rank=N, --json, --timeline, --whole and the overrides of a run.")
        else:
            overrides.append(word)
    return Options(ranks, files["--json"], files["--timeline"], whole, tuple(overrides))


def _ranks(value: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(number) for number in value.split(",")))
    except ValueError:
        raise ConfigError(f"rank={value} is no number of a rank, nor several with commas between them.") from None


def _run(options: Options) -> int:
    config, plan = check_anywhere(options.overrides)
    layout = plan.layout
    for rank in options.ranks or ():
        if not 0 <= rank < layout.world_size:
            raise ConfigError(f"rank={rank}: {layout} has {layout.world_size} ranks, 0 to {layout.world_size - 1}.")
    ranks = options.ranks or tuple(layout.group_of(0, "pp"))
    if plan.precision == "fp8":
        raise ConfigError("precision=fp8 cannot be run dry: its matrix products have no shapes. precision=bf16 keeps the same parameters.")
    print(plan.describe())

    quiet_imports()
    from lightning_3d.dryrun.run import dry_run
    from lightning_3d.dryrun.shapes import Told

    job, told = job_of(config, plan, whole=options.whole), Told()
    reports = []
    for rank in _last_first(ranks, layout):
        started = time.monotonic()
        reports.append(dry_run(job, rank, told))
        print(f"rank {rank}: {reports[-1].micro_batches} of {plan.micro_batches} micro-batches run in {time.monotonic() - started:.1f} s")
    reports.sort(key=lambda report: report.rank)
    print(as_text(reports, plan, config))
    bars = timeline_of(job, reports)
    if bars is not None:
        from lightning_3d.dryrun.timeline import as_svg, idle
        from lightning_3d.dryrun.timeline import as_text as draw

        print(f"\nTimeline of a step, actions as long as their operations; a rank idles {idle(bars):.1%}\n{draw(bars)}")
        if options.timeline is not None:
            options.timeline.write_text(as_svg(bars, plan.describe()))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(reports, plan, bars), indent=1) + "\n")
    return 0


def _last_first(ranks: Sequence[int], layout: Layout) -> list[int]:
    """The ranks of the last stages first: they know what the others must be told."""
    return sorted(ranks, key=lambda rank: -layout.coordinates(rank)["pp"])


def job_of(config: Mapping[str, Any], plan: RunPlan, *, whole: bool = False) -> Job:
    """The job of a configuration."""
    import torch
    from hydra.utils import get_class

    from lightning_3d.dryrun.run import DryStrategy, Job
    from lightning_3d.training.module import CausalLM
    from lightning_3d.training.run import quiet

    quiet()
    arguments = {key: value for key, value in config["parallelism"].items() if not key.startswith("_")}
    arguments |= {"seed": config["seed"], "compile": False}
    own = get_class(config["parallelism"]["_target_"])

    def strategy(kind: type[DryStrategy]) -> DryStrategy:
        return type(own.__name__, (kind, own), {})(**arguments)

    def batch(micro_batches: int) -> dict[str, Any]:
        shape = (micro_batches * plan.micro_batch_size, config["data"]["sequence_length"])
        return {key: torch.zeros(shape, dtype=torch.int64) for key in ("input_ids", "labels")}

    return Job(
        module=lambda: CausalLM({**config["model"], "pretrained": None}, config["optimizer"]),
        strategy=strategy,
        batch=batch,
        layout=plan.layout,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        precision=PRECISIONS[plan.precision],
        clip=config["trainer"]["gradient_clip_val"],
        gpu=plan.accelerator == "gpu",
        whole=whole,
    )


def timeline_of(job: Job, reports: Sequence[RankReport]) -> list[list[Bar]] | None:
    """The actions of all pipeline ranks in time, as long as the operations of one that was measured; None where not all stages were run."""
    from lightning_3d.dryrun.timeline import place
    from lightning_3d.layout.orders import training_order

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
    """What a group of ranks is: the axes along which they differ, joined by +."""
    places = [layout.coordinates(rank) for rank in ranks]
    differ = [axis for axis in layout.order if len({place[axis] for place in places}) > 1]
    return "+".join(differ) or "alone"


def as_text(reports: Sequence[RankReport], plan: RunPlan, config: Mapping[str, Any]) -> str:
    """Tables for the terminal."""
    from lightning_3d.dryrun.meter import CATEGORIES

    lines = [f"\nThe model has {reports[0].whole:,} parameters.\n"]
    header = f"{'rank':>6} {'tp cp pp dp':>12} {'stages':>8} {'parameters':>14} {'memory':>10}"
    lines.append(header + "".join(f" {name:>13}" for name in CATEGORIES))
    for report in reports:
        place = " ".join(f"{report.coordinates[axis]:>2}" for axis in ("tp", "cp", "pp", "dp"))
        stages = ",".join(map(str, report.stages))
        start = f"{report.rank:>6} {place:>12} {stages:>8} {report.parameters:>14,} {_size(report.usage.peak_bytes):>10}"
        lines.append(start + "".join(f" {_size(report.usage.peak[name]):>13}" for name in CATEGORIES))
    memory = config["cluster"].get("memory")
    most = max(reports, key=lambda report: report.usage.peak_bytes)
    if memory:
        share = most.usage.peak_bytes / memory
        lines.append(
            f"\nRank {most.rank} needs the most: {_size(most.usage.peak_bytes)}, {share:.0%} of the {_size(int(memory))} of a GPU,"
            " without what libraries and the allocator take."
        )
    for report in reports:
        lines.append(f"\nRank {report.rank} in a step: {report.usage.flops:.4g} operations, and")
        lines += _collective_lines(report, plan.layout)
    return "\n".join(lines)


def _collective_lines(report: RankReport, layout: Layout) -> list[str]:
    rows: Counter[tuple[str, str, int]] = Counter()
    for call, count in report.usage.collectives.items():
        rows[axes_of(call.ranks, layout), call.name, call.bytes] += count
    ordered = sorted(rows.items(), key=lambda row: (row[0][0], -row[0][2] * row[1]))
    lines = [f"  {'group':<12} {'collective':<24} {'times':>7} {'bytes each':>15} {'together':>12}"]
    return lines + [f"  {axes:<12} {name:<24} {count:>7} {size:>15,} {_size(size * count):>12}" for (axes, name, size), count in ordered]


def as_json(reports: Sequence[RankReport], plan: RunPlan, bars: Sequence[Sequence[Bar]] | None) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "layout": plan.layout.name,
        "ranks": plan.layout.world_size,
        "schedule": plan.schedule,
        "micro_batches": plan.micro_batches,
        "parameters": reports[0].whole,
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
        "timeline": None
        if bars is None
        else [[[bar.letter, bar.stage, bar.micro_batch, bar.start, bar.stop] for bar in rank] for rank in bars],
    }


def _size(count: int) -> str:
    """Bytes in the largest unit that leaves a number above 1."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} B"
