"""A dry run (`trainer.dry=true`): what would run, after every check that a run makes before its
model is built.

Files, packages and classes are checked by the functions that a run calls: in the process that
starts the ranks (`check_files`, `require_loggers`) or in the ranks (`training.run.check_named`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.runs.logger_packages import require_loggers
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.job import prepare_rank
from lightning_3d.errors import Lightning3DError
from lightning_3d.ranks.environment import OutsideRank, print_once

_READ_BY_RANKS = ("huggingface", "instructions")
"""Data whose files only the data module, which imports torch, can find."""


def show_plan(plan: RunPlan, outside: OutsideRank | None) -> None:
    """Check what a run names, and print what would run, and warnings about it.

    Args:
        plan: the checked configuration.
        outside: this process as a rank that torchrun or SLURM started; None if the ranks are
            started here.

    Raises:
        Lightning3DError: a class, a package or a file does not exist. In a dry run for another
            machine, a missing file is only a warning.
    """
    frozen = plan.freeze(asdict(plan.run))
    warnings = [*plan.warnings, *_check_place(plan)]
    if _names_more(frozen):
        _check_named(frozen, files=_is_here(plan))
    print_once(plan.describe(), outside)
    for warning in warnings:
        print_once(f"lightning_3d: {warning}", outside, file=sys.stderr)


def _check_place(plan: RunPlan) -> list[str]:
    """Check files, packages and access to services here. Of another machine only the files can be
    known; returns warnings about them."""
    run = plan.run
    try:
        check_files(run.data, run.trainer.max_steps)
    except Lightning3DError as error:
        if _is_here(plan):
            raise
        return [f"On this machine: {error}"]
    if _is_here(plan):
        require_loggers(run.logger)
    return []


def _is_here(plan: RunPlan) -> bool:
    """True if the run would start on this machine."""
    return plan.run.cluster.nodes == 1 and (plan.accelerator == "cpu" or visible_gpus() > 0)


def _check_named(frozen: dict[str, Any], *, files: bool) -> None:
    """Check classes, and what data modules say about files, as the ranks do."""
    prepare_rank(frozen)
    from lightning_3d.app.training.run import check_named, make_data

    check_named(frozen)
    if (
        files
        and frozen["data"].get("name") in _READ_BY_RANKS
        and frozen["data"].get("path") is not None
    ):
        make_data(frozen)


def _names_more(frozen: Mapping[str, Any]) -> bool:
    """True if a configuration names more than the shipped files do. Only then is torch imported,
    which takes seconds."""
    entries = [
        frozen["parallelism"],
        *(frozen.get("logger") or {}).values(),
        *(frozen.get("callbacks") or {}).values(),
    ]
    shipped = _shipped()
    classes = [
        entry
        for entry in entries
        if entry and set(entry) - shipped.get(str(entry.get("_target_")), set())
    ]
    optimizer = frozen["optimizer"]
    own = [
        one
        for one in (optimizer, optimizer.get("scheduler") or {})
        if one.get("_target_") is not None
    ]
    return bool(
        classes or own or frozen["trainer"]["extra"] or frozen["data"].get("name") in _READ_BY_RANKS
    )


@cache
def _shipped() -> dict[str, set[str]]:
    """Return the arguments that the shipped files give to each class that they name."""
    found: dict[str, set[str]] = {}
    for file in (
        file
        for pattern in ("callbacks/*", "logger/*", "parallelism/base")
        for file in conf_folder().glob(f"{pattern}.yaml")
    ):
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
        assert isinstance(content, dict)
        for entry in (content, *content.values()):
            if isinstance(entry, dict) and "_target_" in entry:
                found.setdefault(entry["_target_"], set()).update(map(str, entry))
    return found
