"""Tasks of lm-eval (EleutherAI's Language Model Evaluation Harness): which there are, and whether
they can run. Imports no torch."""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from multiprocessing.connection import Connection
from typing import Any

from lightning_3d.errors import ConfigError, DataError, Lightning3DError, install, listed

PACKAGE = "lm_eval"
_NEAREST = 3
"""Names that a message about an unknown task proposes."""

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_FOR_GREEDY = {"until", "do_sample", "temperature", "top_p", "top_k", *_LENGTHS}
"""Generation arguments of a task that greedy decoding obeys, or that have no meaning for it."""

_NO_BEAMS = {"num_beams": 1}
"""Arguments with the only values that greedy decoding has."""


@dataclass(frozen=True)
class Tasks:
    """The tasks to evaluate.

    Attributes:
        names: names of tasks, groups and tags, or patterns of them (`mmlu_*`).
        include_path: folder with tasks of the user's own; None: only those of lm-eval.
    """

    names: tuple[str, ...]
    include_path: str | None = None


def require_lm_eval() -> None:
    """Refuse tasks where lm-eval is not installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    try:
        found = importlib.util.find_spec(PACKAGE) is not None
    except ValueError:  # a placeholder in sys.modules without a spec
        found = False
    if not found:
        raise ConfigError(f"--tasks needs the package lm-eval. {install('eval')}.")


def find_tasks(tasks: Tasks) -> tuple[Any, list[str]]:
    """Find tasks, and check that each of them can run: that its data can be read, and that it needs
    only what is computed here.

    Returns:
        The `TaskManager` of lm-eval that has them, and their names.

    Raises:
        ConfigError: a task does not exist, or needs something else. DataError: its data or its file
            cannot be read.
    """
    manager = _index(tasks)
    known = set(manager.all_tasks)
    names: dict[str, None] = {}
    for name in tasks.names:
        found = [name] if name in known else manager.match_tasks([name])
        if not found:
            raise ConfigError(f"There is no task {name}.{_nearest(name, manager.all_tasks)}")
        names.update(dict.fromkeys(found))
    owners: dict[str, str] = {}
    for name in names:
        for task in _load(manager, name):
            _require_computable(task)
            # lm-eval reports groups, and not tags
            owner = name if name in manager.all_groups else task.task_name
            if owners.setdefault(task.task_name, owner) != owner:
                other = owners[task.task_name]
                raise ConfigError(
                    f"The task {task.task_name} is asked for twice: by {other} and by {owner}."
                    " Leave one out."
                )
    return manager, list(names)


def find_tasks_apart(tasks: Tasks) -> bytes:
    """Do what `find_tasks` does in a process of its own, and return its result for `pickle.loads`.

    lm-eval's imports start threads, and ranks can be forked only from a process that has none.
    """
    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, tasks), daemon=True)
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        process.join()
        raise DataError(
            f"The process that reads the tasks ended with exit code {process.exitcode}."
        ) from None
    process.join()
    if isinstance(answer, Lightning3DError):
        raise answer
    return bytes(answer)


def _answer(pipe: Connection, tasks: Tasks) -> None:
    # rank 0 reads the tasks once more, and shows warnings
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)
    try:
        answer: Any = pickle.dumps(find_tasks(tasks))
    except Lightning3DError as error:
        answer = error
    pipe.send(answer)


def _index(tasks: Tasks) -> Any:
    """Index the user's tasks alone, where these are all; the index of lm-eval's own 14 thousand
    takes many seconds.

    A group may contain tasks of lm-eval, so it needs the whole index.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(f"lm-eval cannot be imported: {error}. {install('eval')}.") from error
    if tasks.include_path is not None:
        own = TaskManager(include_path=tasks.include_path, include_defaults=False)
        if set(tasks.names) <= set(own.all_subtasks):
            return own
    return TaskManager(include_path=tasks.include_path)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = (
        get_close_matches(name, known, n=_NEAREST, cutoff=0.6)
        or [other for other in known if name.lower() in other.lower()][:_NEAREST]
    )
    return f" The nearest: {listed(near)}." if near else " lm-eval ls tasks lists those of lm-eval."


def _load(manager: Any, name: str) -> list[Any]:
    """Load a task or all tasks of a group, with their data: from the cache of Hugging Face, the
    hub, or files of the user."""
    try:
        return list(manager.load([name])["tasks"].values())
    except Exception as error:  # of data sets, YAML, templates, and functions of the task
        first = (str(error).strip().splitlines() or [""])[0]
        offline = (
            " Load it once on a machine that reaches the hub, or copy its cache (HF_HOME)."
            if isinstance(error, OSError)
            else ""
        )
        raise DataError(
            f"The task {name} cannot be loaded: {type(error).__name__}:"
            f" {first.rstrip('.')}.{offline}"
        ) from error


def _require_computable(task: Any) -> None:
    """Refuse a task that needs more than log-likelihoods and greedy text."""
    name = task.task_name
    if getattr(task, "MULTIMODAL", False):
        raise ConfigError(
            f"The task {name} has images or sound; only tasks of text can be evaluated."
        )
    if getattr(task, "UNSAFE_CODE", False):
        raise ConfigError(
            f"The task {name} runs code that the model writes, which is not safe here. Use lm-eval"
            " with an exported model."
        )
    if task.get_config("output_type") == "generate_until":
        _require_greedy(name, task.get_config("generation_kwargs") or {})


def _require_greedy(name: str, arguments: Mapping[str, Any]) -> None:
    samples = arguments.get("do_sample", float(arguments.get("temperature") or 0) > 0)
    others = [
        key
        for key, value in arguments.items()
        if key not in _FOR_GREEDY and value != _NO_BEAMS.get(key, ...)
    ]
    if samples or others:
        what = "samples its text (do_sample)" if samples else f"sets {listed(others)}"
        raise ConfigError(
            f"The task {name} {what}; only greedy decoding is supported. Use lm-eval with an"
            " exported model."
        )
