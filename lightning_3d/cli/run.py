"""`lightning-3d run CONFIG.yaml`: trains from a complete configuration, such as the one that every run leaves in its folder,
without composing anything.

A configuration that lies in the run folder it names takes that folder, once: a sweep writes it there and starts it. To
repeat a run, name a new folder. torch is imported after all checks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_3d.config.plan_run import plan_run
from lightning_3d.errors import ConfigError, Lightning3DError, is_full
from lightning_3d.planner.advice import Advice
from lightning_3d.ranks.environment import OutsideRank, print_once, refuse
from lightning_3d.runs.ending import CommandLine
from lightning_3d.runs.folder import CONFIG_FILE, RunFolder
from lightning_3d.runs.frozen_config import move_to, read_frozen
from lightning_3d.training.job import find_place, run_job, show_plan


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are to be started here.
    """
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        return _run(Path(options.config), options, outside)
    except Lightning3DError as error:
        return refuse(error, outside)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if is_full(error):
            print_once(f"lightning_3d: {error}", outside, file=sys.stderr)
        else:
            traceback.print_exc()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-3d run",
        description="Train from a complete configuration, as every run leaves it in its folder. Nothing is composed.",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="the configuration; in the folder that it names, a run that has not begun")
    parser.add_argument("--folder", metavar="NEW", help="another run folder than the one that the configuration names")
    parser.add_argument(
        "--resume", metavar="CHECKPOINT", nargs="?", const="", help="go on in the run folder, from its newest checkpoint or from this one"
    )
    return parser


def _run(path: Path, options: argparse.Namespace, outside: OutsideRank | None) -> int:
    config = read_frozen(path)
    if options.folder is not None and options.resume is not None:
        raise ConfigError("--resume goes on in the folder of the run, so --folder cannot be given with it.")
    if options.folder is not None:
        config = move_to(config, Path(options.folder).absolute())
    plan = plan_run(OmegaConf.create(config), outside, Advice())
    if config["trainer"].get("dry"):
        show_plan(plan, outside)
        return 0

    folder = Path(config["run_folder"])

    def take(earlier: Path | None) -> RunFolder:
        if options.resume is not None:
            return _reopen(folder, config, options.resume)
        return RunFolder.take(folder, config, lambda: _take(folder, path), earlier)

    place = find_place(outside, config.get("logger"), take)
    if outside is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return run_job(config, plan, outside, place, CommandLine.of_run())


def _reopen(folder: Path, config: dict[str, Any], checkpoint: str) -> RunFolder:
    """The folder of a run that ended early.

    Raises:
        ConfigError: there is no checkpoint to go on from, or the run has not ended.
    """
    reopened = RunFolder.reopen(folder, config)
    if checkpoint:
        return replace(reopened, resume=checkpoint)
    if reopened.resume is None:
        raise ConfigError(f"{folder} has no complete checkpoint to resume from. --folder NEW repeats the run in a new folder.")
    return reopened


def _take(folder: Path, config: Path) -> RunFolder:
    """The folder that was prepared with this very file, else a new one."""
    file = folder / CONFIG_FILE
    if file.exists() and file.samefile(config):
        return RunFolder.adopt(folder)
    return RunFolder.claim(folder, numbered=False, option="--folder")
