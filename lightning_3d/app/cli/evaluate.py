"""`lightning-3d evaluate`: loss and perplexity of validation sets, or tasks of lm-eval, in any
layout. Imports torch after all checks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_3d.app.cli import evaluate_tasks
from lightning_3d.app.cli.find_checkpoint import AVERAGE, find_checkpoint, require_average
from lightning_3d.app.cli.options import Command
from lightning_3d.app.cli.output_file import output_file
from lightning_3d.app.evaluation.job import check
from lightning_3d.app.evaluation.job import run as run_ranks
from lightning_3d.app.evaluation.subject import find_subject
from lightning_3d.app.evaluation.table import losses_table, write_json
from lightning_3d.app.training.job import prepare_rank
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.environment import OutsideRank, print_once

MODEL = (
    "a checkpoint, a run folder (its newest checkpoint is used), or a model folder of Transformers"
)
TOKENIZER = (
    "tokenizer, a folder or a name on the hub; default: the one that the run or the folder has"
)

COMMAND = Command(
    "evaluate",
    "Compute loss and perplexity of a trained model on whole validation sets: by default those of"
    " its run, in the layout of its run. Any other layout gives the same numbers. A model folder of"
    " Transformers is evaluated on one rank by default, and needs data=... With --tasks, evaluate"
    " benchmarks of lm-eval instead.",
    examples=[
        "outputs/run",
        "outputs/run/checkpoints/step_100.ckpt parallelism=tp4 --json losses.json",
        (
            "my-model data=blend"
            " 'data.sources={web:{val_path:/data/web},code:{val_path:/data/code}}'"
            " data.sequence_length=4096"
        ),
        "outputs/run --tasks hellaswag,arc_easy parallelism=tp2_dp4 parallelism.micro_batch_size=8",
    ],
)
COMMAND.argument("MODEL", MODEL)
COMMAND.option(
    "--json",
    "FILE",
    "file to write, with the results in full precision",
    type=output_file("--json"),
)
COMMAND.flag("--average", AVERAGE)
evaluate_tasks.add_options(COMMAND, TOKENIZER)


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started
            here.
    """
    return COMMAND.run(
        arguments, lambda options, overrides: _run(options, overrides, outside), outside=outside
    )


def _run(options: Namespace, overrides: Sequence[str], outside: OutsideRank | None) -> int:
    subject = find_subject(find_checkpoint(options.model), options.model)
    if options.average:
        require_average(subject.path)
    if options.tasks is not None:
        return evaluate_tasks.run(options, subject, overrides, outside)
    evaluate_tasks.refuse_without_tasks(options)
    if subject.run is None and not any(word.startswith("data=") for word in overrides):
        raise ConfigError(
            f"{options.model} is a model folder, and no run says its validation data. Name them,"
            " for example data=tokens."
        )
    evaluation = check(subject, overrides, outside, reads_data=True)
    print_once(evaluation.describe(), outside)
    json = None if options.json is None else str(options.json.absolute())
    request = {"about": evaluation.about(), "json": json, "average": options.average}
    return run_ranks(evaluation, evaluate_rank, request, outside)


def evaluate_rank(config: dict[str, Any], checkpoint: str | None, request: dict[str, Any]) -> None:
    """Evaluate in one rank. Rank 0 prints the results, and writes the file."""
    prepare_rank(config)
    from lightning_3d.app.evaluation.session import Session

    session = Session(config, checkpoint, average=request.get("average", False))
    sets = {entry.name: entry.numbers() for entry in session.losses()}
    if session.trainer.is_global_zero:
        print(losses_table(sets), flush=True)
        if request["json"] is not None:
            write_json(Path(request["json"]), {**request["about"], "sets": sets})
