"""`lightning-3d run CONFIG.yaml`: train from a complete configuration, such as the one that every
run leaves in its folder.

No Hydra groups are composed. A sweep prepares the run folder of each job with a `config.yaml`; that
file runs in this very folder, but only once. To repeat a run, name a new folder. torch is imported
after all checks.
"""

from __future__ import annotations

import signal
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_3d.app.cli.options import Command
from lightning_3d.app.config.plan_run import plan_run
from lightning_3d.app.planner.advice import PlannerAdvice
from lightning_3d.app.runs.ending import CommandLine
from lightning_3d.app.runs.folder import CONFIG_FILE, RunFolder
from lightning_3d.app.runs.frozen_config import move_to, read_frozen
from lightning_3d.app.runs.resumed_keys import require_resumable
from lightning_3d.app.runs.status import read_status
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.dry import show_plan
from lightning_3d.app.training.job import find_place, run_job
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.environment import OutsideRank

COMMAND = Command(
    "run",
    "Train from a complete configuration, such as the config.yaml that every run leaves in its"
    " folder. Hydra does not change it.",
    takes="",
    progress=False,
    examples=["outputs/run/config.yaml --folder outputs/again", "outputs/run/config.yaml --resume"],
)
COMMAND.argument(
    "CONFIG.yaml",
    "the configuration file; one that a sweep prepared runs in its own folder, and only once",
)
COMMAND.option("--folder", "NEW", "use another run folder than the one in the configuration")
COMMAND.option(
    "--resume",
    "CHECKPOINT",
    "resume in the same run folder, from CHECKPOINT or from the newest checkpoint there",
    nargs="?",
    const="",
)


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started
            here.
    """
    return COMMAND.run(
        arguments,
        lambda options, _: _run(Path(options.config), options, outside),
        outside=outside,
        shown=(),
    )


def _run(path: Path, options: Namespace, outside: OutsideRank | None) -> int:
    config = read_frozen(path)
    if options.folder is not None and options.resume is not None:
        raise ConfigError(
            "--resume continues in the folder of the run, so it cannot be combined with --folder."
            " Leave out one of them."
        )
    if options.folder is not None:
        config = move_to(config, Path(options.folder).absolute())
    elif Path(config["run_folder"]).resolve() != path.parent.resolve():
        config = _moved(config, path.absolute(), resumes=options.resume is not None)
    plan = plan_run(OmegaConf.create(config), outside, PlannerAdvice())
    require_resumable(config["trainer"].get("resume"), config)
    if config["trainer"].get("dry"):
        show_plan(plan, outside)
        return 0

    if outside is None:
        check_files(config["data"], config["trainer"].get("max_steps"))
    folder = Path(config["run_folder"])

    def take(earlier: Path | None) -> RunFolder:
        if options.resume is not None:
            return _reopen(folder, config, options.resume)
        return RunFolder.take(folder, config, lambda: _take(folder, path), earlier)

    place = find_place(outside, plan, take)
    if outside is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return run_job(config, plan, outside, place, CommandLine.of_run())


def _moved(config: dict[str, Any], path: Path, *, resumes: bool) -> dict[str, Any]:
    """Return the configuration of a run whose folder was moved or copied.

    Raises:
        ConfigError: the file is not in a run folder, or nothing says whether to resume the run
            there.
    """
    if resumes and read_status(path.parent) is not None:
        return move_to(config, path.parent, whole=True)
    resume = " To resume it here, use --resume." if read_status(path.parent) is not None else ""
    raise ConfigError(
        f"{path} is not in the folder of its run, {config['run_folder']}.{resume} To repeat the run"
        f" in a new folder, use --folder {path.parent / 'run'}."
    )


def _reopen(folder: Path, config: dict[str, Any], checkpoint: str) -> RunFolder:
    """Reopen the folder of a run that ended early.

    Raises:
        ConfigError: there is no checkpoint to resume, or the run has not ended.
    """
    reopened = RunFolder.reopen(folder, config)
    if checkpoint:
        reopened = replace(reopened, resume=checkpoint)
    if reopened.resume is None:
        raise ConfigError(
            f"{folder} has no complete checkpoint to resume. To repeat the run in a new folder, use"
            " --folder NEW."
        )
    require_resumable(reopened.resume, config)  # the file may have been edited since
    return reopened


def _take(folder: Path, config: Path) -> RunFolder:
    """Take the folder if it was prepared with this very file; otherwise create it."""
    file = folder / CONFIG_FILE
    if file.exists() and file.samefile(config):
        return RunFolder.adopt(folder)
    return RunFolder.claim(folder, numbered=False, option="--folder")
