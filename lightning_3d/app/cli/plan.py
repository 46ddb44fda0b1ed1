"""`lightning-3d plan`: find the fastest layouts of a model on a cluster. Imports no torch."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.app.cli.options import Command
from lightning_3d.compat.imports import without_collector
from lightning_3d.errors import ConfigError, plural

if TYPE_CHECKING:
    from lightning_3d.app.config.run_config import CompleteRun
    from lightning_3d.app.planner.machine import Machine
    from lightning_3d.app.planner.scaling import Series
    from lightning_3d.app.planner.search import SearchResult

COMMAND = Command(
    "plan",
    "Find the fastest layouts of a model on a cluster, without its GPUs. Prints the best few"
    " layouts and why each is slower than the fastest, and writes plan.json and plan.html.\n\nTo"
    " compare predictions with measured runs, run in a checkout: python -m"
    " benchmarks.planner_accuracy FILE.csv",
    examples=[
        "model=llama3_70b cluster=h100_32x8 data.global_batch_size=1024 data.sequence_length=8192",
        (
            "--scaling 1024 model=llama3_70b cluster=h100_32x8 data.global_batch_size=1024"
            " data.sequence_length=8192"
        ),
    ],
    hints={
        "--evaluate": (
            "--evaluate is now a script of the repository: python -m benchmarks.planner_accuracy"
            " FILE.csv"
        )
    },
)
COMMAND.option(
    "--out",
    "FOLDER",
    "where to write plan.json and plan.html; default: the current folder",
    default=".",
)
COMMAND.count(
    "--scaling",
    "also find the fastest layouts of 1, 2, 4, ... nodes with at most N GPUs, and compare the speed"
    " of a GPU",
)
COMMAND.count(
    "--validate",
    "also train the N best layouts for a few steps each, here or on the nodes of this SLURM job,"
    " and compare",
)
COMMAND.count(
    "--steps",
    "timed steps of each layout with --validate, after one warm-up step; default: 4",
    default=4,
)
COMMAND.word(
    "parallelism.KEY=VALUE",
    "fix a choice: schedule, micro_batch_size, zero_stage, zero_shard_size, recompute,"
    " sequence_parallel, order",
)
COMMAND.word(
    "plan.memory_risk=P",
    "largest probability with which a proposed layout may run out of memory; default: 0.1",
)
COMMAND.word(
    "plan.max_bubble=SHARE",
    "largest share of a step, 0 to 1, that pipeline ranks may wait for each other; default: 1",
)
COMMAND.word(
    "profile=FILE.json",
    "measurements that lightning-3d profile wrote, used instead of the planner's constants",
)


_OWN = " (the longest that the model supports; for another length, set data.sequence_length)"


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    # it would take one twentieth of the time, and a plan leaves 100 MiB at most
    with without_collector():
        return COMMAND.run(arguments, _plan)


def _own_length(run: CompleteRun, overrides: Sequence[str]) -> list[str]:
    """Return the override that sets the length of a sequence to the model's own where nothing sets
    it; empty where the model states none or the data's default is about as long."""
    longest, length = run.spec.max_positions, run.data.get("sequence_length")
    given = any(
        word.lstrip("+").startswith(("data.sequence_length=", "recipe=")) for word in overrides
    )
    return (
        []
        if given or longest is None or (isinstance(length, int) and longest < 2 * length)
        else [f"data.sequence_length={longest}"]
    )


def _complete(overrides: list[str]) -> tuple[CompleteRun, list[str], Mapping[str, Any]]:
    """Return the run, the overrides with the model's own length if nothing sets one, and the option
    of each config group."""
    from lightning_3d.app.cli.plan_words import config_choices
    from lightning_3d.app.config.compose import compose
    from lightning_3d.app.config.plan_run import check_keys
    from lightning_3d.app.config.run_config import complete_run

    config = compose([*overrides, "trainer.dry=true"])
    keys = check_keys(config)
    keys.cluster.check()
    keys.plan.check()
    run = complete_run(keys)
    if own := _own_length(run, overrides):
        overrides = [*overrides, *own]
        run = complete_run(check_keys(compose([*overrides, "trainer.dry=true"])))
    if not isinstance(run.data.get("sequence_length"), int) or not isinstance(
        run.data.get("global_batch_size"), int
    ):
        raise ConfigError(
            "data.sequence_length (in tokens) and data.global_batch_size (in sequences) must be"
            " given, for example data.sequence_length=4096 data.global_batch_size=256."
        )
    return run, overrides, config_choices(config)


def _plan(options: Namespace, overrides: list[str]) -> int:
    from lightning_3d.app.cli.plan_validation import require_here, starter, validate
    from lightning_3d.app.cli.plan_words import introduce, training_words
    from lightning_3d.app.config.machine import choose_precision
    from lightning_3d.app.planner.advice import machine_of_run, plan, planned_accelerator
    from lightning_3d.app.planner.scaling import scaling, scaling_tables

    folder, validated = Path(options.out), options.validate or 0
    if not folder.is_dir():
        raise ConfigError(
            "--out must be an existing folder for plan.json and plan.html; there is no folder"
            f" {folder}."
        )
    given = len(overrides)
    run, overrides, choices = _complete(overrides)
    machine = machine_of_run(run)
    if validated and machine is not None:
        require_here(machine, run.cluster)
    precision = choose_precision(run, planned_accelerator(run))
    found = plan(run, precision, most=max(5, validated))
    assert machine is not None
    series = scaling(run, precision, options.scaling) if options.scaling else None
    title = f"{run.model.get('name') or run.model['config']['model_type']} on {run.cluster.name}"
    length = (
        f"sequences of {run.data['sequence_length']} tokens a"
        f" step{_OWN if len(overrides) > given else ''}"
    )
    print(f"{title}: {run.data['global_batch_size']} {length}\n")
    _show(run, precision, found, machine)
    if series is not None:
        print(f"\n{scaling_tables(series, machine.unit)}")
    training = training_words(overrides, found.best[0].job, choices)
    command = shlex.join(["lightning-3d", "train", *training.words])
    _write(folder, run, found, machine, title, command, series)
    counted = (
        f"{found.shapes} layouts and micro-batch sizes considered,"
        f" {plural(len(found.simulated), 'schedule')} simulated"
    )
    print(f"\nWrote {folder / 'plan.json'} and {folder / 'plan.html'}: {counted}.")
    start = starter(machine, run.cluster)
    code = (
        validate(overrides, found.best[:validated], options.steps, start, folder)
        if validated
        else 0
    )
    print(f"\n{introduce(training.missing, machine)}\n{command}")
    return code


def _show(run: CompleteRun, precision: str, found: SearchResult, machine: Machine) -> None:
    """Print the fastest layouts, and memory, messages and warnings of the first."""
    from lightning_3d.app.planner.advice import (
        faster_chunked,
        faster_compiled,
        faster_overlapped,
        measured_otherwise,
        spanning,
        uncounted,
    )
    from lightning_3d.app.planner.tables import (
        chunked_line,
        compiled_line,
        data_line,
        found_table,
        margin,
        memory_table,
        overlapped_line,
    )

    first = found.best[0]
    print(found_table(found, machine))
    print(f"\nMemory of the fullest rank of {first.job.layout.name}:\n{memory_table(first.memory)}")
    print(f"  {margin(first.memory, machine)}")
    print(f"\n{data_line(first.job, machine)}")
    for warning in (*measured_otherwise(run), *uncounted(run), *spanning(first.job, machine)):
        print(f"\n{warning}")
    if (overlapped := faster_overlapped(run, found)) is not None:
        print(f"\n{overlapped_line(overlapped, first)}")
    if (chunked := faster_chunked(run, precision, first)) is not None:
        print(f"\n{chunked_line(chunked, first)}")
    if (faster := faster_compiled(run, precision, first)) is not None:
        print(f"\n{compiled_line(faster, first)}")


def _write(
    folder: Path,
    run: CompleteRun,
    found: SearchResult,
    machine: Machine,
    title: str,
    command: str,
    series: Series | None,
) -> None:
    """Write plan.json and plan.html."""
    from lightning_3d.app.planner.html_page import page
    from lightning_3d.app.planner.scaling import scaling_data
    from lightning_3d.app.planner.tables import as_data
    from lightning_3d.app.runs.report.page import ASSETS

    content = {
        "title": title,
        "gpus": machine.gpus,
        "sequence_length": run.data["sequence_length"],
        "global_batch_size": run.data["global_batch_size"],
        "shapes": found.shapes,
        "expanded": found.expanded,
        "memory_risk": run.plan.memory_risk,
        "command": command,
        "best": [as_data(one, machine) for one in found.best],
        "simulated": len(found.simulated),
        "seen": [as_data(one, machine) for one in found.seen],
        **({"scaling": scaling_data(series)} if series is not None else {}),
    }
    (folder / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    style = (ASSETS / "style.css").read_text("utf-8")
    (folder / "plan.html").write_text(
        page(found, machine, title, style, run.plan.memory_risk, command, series), encoding="utf-8"
    )
