"""`lightning-3d evaluate --tasks`: benchmarks of lm-eval, in any layout. torch and lm-eval are
imported after all checks."""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.app.cli.options import Command, whole_number
from lightning_3d.app.evaluation.job import check
from lightning_3d.app.evaluation.job import run as run_ranks
from lightning_3d.app.evaluation.subject import Subject
from lightning_3d.app.evaluation.tasks import Tasks, find_tasks, find_tasks_apart, require_lm_eval
from lightning_3d.app.evaluation.text import (
    Text,
    find_tokenizer,
    open_text,
    refuse_bytes,
    require_chat_template,
    stop_tokens,
)
from lightning_3d.app.training.job import prepare_rank
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.environment import OutsideRank, outside_rank, print_once
from lightning_3d.ranks.progress import task

if TYPE_CHECKING:
    from lightning_3d.app.evaluation.ranks_together import RanksTogether
    from lightning_3d.app.evaluation.session import Session
    from lightning_3d.app.evaluation.task_results import TaskResults

FOLDER = "lm_eval"
"""Folder for results in the folder of a run."""

_OWN = (
    "include_path",
    "num_fewshot",
    "apply_chat_template",
    "limit",
    "max_length",
    "tokenizer",
    "log_samples",
)
"""Options that have no meaning without --tasks."""
_OF_LM_EVAL = ("num_fewshot", "apply_chat_template", "limit", "log_samples")
"""Those that lm-eval takes as they are."""


def add_options(command: Command, tokenizer: str) -> None:
    """Add the options of tasks to the command."""
    command.option(
        "--tasks",
        "NAMES",
        "benchmarks of lm-eval to evaluate instead of the loss: tasks, groups or patterns, with"
        " commas between them",
        type=_names,
    )
    command.option(
        "--include-path",
        "FOLDER",
        "folder with tasks of your own, in the YAML format of lm-eval",
        type=_folder,
    )
    command.option(
        "--num-fewshot",
        "N",
        "examples in the prompt; default: as the task says",
        type=whole_number("--num-fewshot"),
    )
    command.flag(
        "--apply-chat-template",
        "put prompts into the chat template of the tokenizer, with examples as earlier turns",
    )
    command.option(
        "--limit",
        "N",
        "use only the first N samples of each task, or a fraction below 1",
        type=_limit,
    )
    command.count(
        "--max-length",
        "longest text in tokens; longer ones lose their left end; default: what the model takes",
    )
    command.option("--tokenizer", "FOLDER", tokenizer)
    command.flag("--log-samples", "also write each sample with its answers")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(
            "--tasks needs the name of a task, for example --tasks hellaswag,arc_easy."
        )
    return names


def _folder(text: str) -> str:
    if not Path(text).expanduser().is_dir():
        raise ConfigError(f"--include-path must be a folder with tasks; there is no folder {text}.")
    return str(Path(text).expanduser().absolute())


def _limit(text: str) -> int | float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf") or (value >= 1 and value != int(value)):
        raise ConfigError(
            "--limit must be a whole number of at least 1, or a fraction between 0 and 1; got"
            f" {text or 'an empty string'}."
        )
    return value if value < 1 else int(value)


def refuse_without_tasks(options: Namespace) -> None:
    """Refuse options of tasks where there are none."""
    given = [name for name in _OWN if getattr(options, name) not in (None, False)]
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} has a meaning only with --tasks NAMES.")


def run(
    options: Namespace, subject: Subject, overrides: Sequence[str], outside: OutsideRank | None
) -> int:
    """Evaluate tasks and return the exit code.

    Raises:
        Lightning3DError: what cannot work.
    """
    require_lm_eval()
    tasks = Tasks(options.tasks, options.include_path)
    tokenizer = find_tokenizer(subject, options.tokenizer)
    if options.apply_chat_template:
        refuse_bytes(tokenizer)
    evaluation = check(subject, overrides, outside, reads_data=False)
    folder = _results_folder(subject, options)
    found = None
    if outside is None:
        with task("reading the tasks"):
            found = find_tasks_apart(tasks)
    print_once(evaluation.describe(), outside)
    request = {
        "tasks": asdict(tasks),
        "found": found,
        "tokenizer": tokenizer,
        "stop": stop_tokens(subject),
        "max_length": options.max_length,
        "about": evaluation.about(),
        "folder": folder,
        "file": None if options.json is None else str(options.json.absolute()),
        "average": options.average,
        "options": {key: getattr(options, key) for key in _OF_LM_EVAL},
    }
    return run_ranks(evaluation, evaluate_tasks_rank, request, outside)


def _results_folder(subject: Subject, options: Namespace) -> str | None:
    """Return the folder for results: that of the file, or one in the folder of the run; None where
    there is no run.

    Raises:
        ConfigError: there is none for the samples, or the folder of the run cannot be written.
    """
    if options.json is not None:
        return str(options.json.absolute().parent)
    if subject.folder is None:
        if options.log_samples:
            raise ConfigError(
                f"--log-samples needs --json FILE here: {subject.path} is not in the folder of a"
                " run, so nothing is written."
            )
        return None
    if not os.access(subject.folder, os.W_OK):
        raise ConfigError(
            f"The results cannot be written to the run folder {subject.folder}. Name a file for"
            " them with --json FILE."
        )
    return str(subject.folder / FOLDER / subject.path.name)


def evaluate_tasks_rank(
    config: dict[str, Any], checkpoint: str | None, request: dict[str, Any]
) -> None:
    """Evaluate tasks in one rank. Rank 0 runs lm-eval, prints the results and writes the files."""
    prepare_rank(config)
    from lightning_3d.app.evaluation.engine import EvaluationEngine
    from lightning_3d.app.evaluation.ranks_together import run_together
    from lightning_3d.app.evaluation.session import Session

    text = open_text(request["tokenizer"], request["stop"])
    if request["options"].get("apply_chat_template"):
        require_chat_template(text, request["tokenizer"])
    session = Session(config, checkpoint, average=request.get("average", False))
    place = outside_rank()  # the Trainer does not know its rank before it works
    evaluate = _evaluation(session, text, request) if place is None or place.rank == 0 else None
    results = session.work(
        lambda trainer: run_together(EvaluationEngine(trainer, session.max_length), text, evaluate)
    )
    if results is not None:
        print(results.table(), flush=True)
        if request["folder"] is not None:
            path = results.write(
                Path(request["folder"]), Path(request["file"]) if request["file"] else None
            )
            print(f"results: {path}", flush=True)


def _evaluation(
    session: Session, text: Text, request: dict[str, Any]
) -> Callable[[RanksTogether], TaskResults]:
    """Check on rank 0 what it alone checks, and return the function that evaluates the tasks."""
    found = request["found"]
    manager, names = (
        pickle.loads(found) if found is not None else find_tasks(Tasks(**request["tasks"]))
    )
    from lightning_3d.app.evaluation.task_model import TaskLM, positions_of
    from lightning_3d.app.evaluation.task_results import TaskResults

    length = request["max_length"] or positions_of(session.module.config, text)
    session.require_length(length)
    vocabulary, about, options = session.vocabulary, request["about"], request["options"]
    return lambda ranks: TaskResults(
        TaskLM(ranks, text, length, vocabulary), about, manager, names, options
    )
