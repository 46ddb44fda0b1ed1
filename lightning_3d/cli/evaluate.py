"""`lightning-3d evaluate`: loss and perplexity of validation sets, in any layout. torch is imported after all checks."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.cli.find_checkpoint import find_checkpoint
from lightning_3d.cli.options import Command, whole_number
from lightning_3d.cli.output_file import output_file
from lightning_3d.errors import ConfigError, install
from lightning_3d.evaluation.job import check
from lightning_3d.evaluation.job import run as run_ranks
from lightning_3d.evaluation.subject import find_subject
from lightning_3d.evaluation.table import losses_table, tasks_table, write_json
from lightning_3d.evaluation.text import find_tokenizer, open_text, stop_tokens
from lightning_3d.ranks.environment import OutsideRank, print_once
from lightning_3d.ranks.progress import task
from lightning_3d.training.job import prepare_rank

if TYPE_CHECKING:
    from lightning_3d.evaluation.session import Session

MODEL = "a checkpoint, a run folder (its newest checkpoint is used), or a model folder of Transformers"
TOKENIZER = "tokenizer, a folder or a name on the hub; default: the one that the run or the folder has"

COMMAND = Command(
    "evaluate",
    "Compute loss and perplexity of a trained model on whole validation sets: by default those of its run, in the layout of its run."
    " Any other layout gives the same numbers. A model folder of Transformers is evaluated on one rank by default, and needs data=...\n\n"
    "With --tasks, run tasks of lm-eval, and evaluate validation sets only where data=... or data.KEY=... is given.",
    examples=[
        "outputs/run",
        "outputs/run/checkpoints/step_100.ckpt parallelism=tp4 --json losses.json",
        "my-model data=blend 'data.sources={web:{val_path:/data/web},code:{val_path:/data/code}}' data.sequence_length=4096",
    ],
)
COMMAND.argument("MODEL", MODEL)
COMMAND.option("--json", "FILE", "file to write, with the results in full precision", type=output_file("--json"))
COMMAND.option("--tasks", "NAMES", "tasks of lm-eval, with commas between them, such as hellaswag,arc_easy; needs the extra eval")
COMMAND.count("--limit", "examples of each task; default: all")
COMMAND.option("--num-fewshot", "N", "examples in front of each question; default: as the task says", type=whole_number("--num-fewshot"))
COMMAND.option("--include-path", "FOLDER", "folder with tasks of your own")
COMMAND.option("--tokenizer", "FOLDER", TOKENIZER)


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started here.
    """
    return COMMAND.run(arguments, lambda options, overrides: _run(options, overrides, outside), outside=outside)


def _run(options: Namespace, overrides: Sequence[str], outside: OutsideRank | None) -> int:
    subject = find_subject(find_checkpoint(options.model), options.model)
    reads_data = options.tasks is None or any(word.lstrip("+").startswith(("data=", "data.")) for word in overrides)
    if reads_data and subject.run is None and not any(word.startswith("data=") for word in overrides):
        raise ConfigError(f"{options.model} is a model folder, and no run says its validation data. Name them, for example data=tokens.")
    tasks = _tasks(options)
    tokenizer = find_tokenizer(subject, options.tokenizer) if tasks is not None else None
    evaluation = check(subject, overrides, outside, reads_data=reads_data)
    if tasks is not None:
        with task("importing lm-eval"):
            from lightning_3d.evaluation.harness import Tasks, require_tasks
        require_tasks(Tasks(**tasks))
    print_once(evaluation.describe(), outside)
    file = None if options.json is None else str(options.json.absolute())
    request: dict[str, Any] = {"about": evaluation.about(), "json": file, "reads_data": reads_data, "tasks": tasks}
    request |= {"tokenizer": tokenizer, "stop": stop_tokens(subject)}
    return run_ranks(evaluation, evaluate_rank, request, outside)


def _tasks(options: Namespace) -> dict[str, Any] | None:
    """Check the options of tasks, and return the fields of `Tasks`; None without tasks.

    Raises:
        ConfigError: lm-eval is not installed, or an option cannot be used.
    """
    if options.tasks is None:
        for name in ("limit", "num_fewshot", "include_path"):
            if getattr(options, name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --tasks.")
        return None
    names = tuple(filter(None, (name.strip() for name in options.tasks.split(","))))
    if not names:
        raise ConfigError("--tasks must name at least one task, for example --tasks hellaswag.")
    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise ConfigError(f"--include-path must be a folder with tasks; there is no folder {options.include_path}.")
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks needs the package lm-eval. {install('eval')}.")
    return {"names": names, **{name: getattr(options, name) for name in ("limit", "num_fewshot", "include_path")}}


def evaluate_rank(config: dict[str, Any], checkpoint: str | None, request: dict[str, Any]) -> None:
    """Evaluate in one rank. Rank 0 prints the results, and writes the file."""
    prepare_rank(config)
    from lightning_3d.evaluation.session import Session

    session = Session(config, checkpoint)
    content: dict[str, Any] = dict(request["about"])
    if request["reads_data"]:
        content["sets"] = {
            entry.name: {"loss": entry.loss, "perplexity": entry.perplexity, "tokens": entry.tokens, "samples": entry.samples}
            for entry in session.losses()
        }
    if request["tasks"] is not None:
        content["tasks"] = _run_tasks(session, request)
    if session.trainer.is_global_zero:
        tables = [show(content[part]) for part, show in (("sets", losses_table), ("tasks", tasks_table)) if part in content]
        print("\n\n".join(tables), flush=True)
        if request["json"] is not None:
            write_json(Path(request["json"]), content)


def _run_tasks(session: Session, request: dict[str, Any]) -> dict[str, dict[str, Any]]:
    from lightning_3d.evaluation.engine import Engine
    from lightning_3d.evaluation.harness import Tasks, run_tasks

    text, tasks, first = open_text(request["tokenizer"], request["stop"]), Tasks(**request["tasks"]), session.trainer.is_global_zero
    return session.work(lambda trainer: run_tasks(Engine(trainer, session.max_length), text, tasks, bootstraps=first))
