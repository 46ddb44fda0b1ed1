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

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.config import plan_run
from lightning_3d.config_keys import explain_value
from lightning_3d.ending import CommandLine
from lightning_3d.errors import ConfigError, Lightning3DError, is_full
from lightning_3d.job import find_place, print_once, refuse, run_job, show_plan
from lightning_3d.launch import OutsideRank
from lightning_3d.prediction import Advice
from lightning_3d.run_folder import CONFIG_FILE, RunFolder

_WRITE_TO_FOLDER = ("logger", "callbacks", "trainer")
_READ_FROM_ANYWHERE = ("resume",)


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


def read_frozen(path: Path) -> dict[str, Any]:
    """The configuration in a file, as dicts and lists.

    Raises:
        ConfigError: no file, no YAML, or no configuration of a run.
    """
    not_complete = f"{path} is no complete configuration of a run"
    hint = f"lightning-3d run takes the {CONFIG_FILE} that a run leaves in its folder, not that in .hydra; lightning-3d train composes one."
    try:
        path.read_text("utf-8")
        content = OmegaConf.load(path)  # as Hydra reads numbers: 1e-5 is a word for other readers of YAML
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration {path} cannot be read: not a text.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    except OSError as error:
        if error.strerror is None:  # OmegaConf: a number or a word alone
            raise ConfigError(f"{not_complete}: it has no keys. {hint}") from error
        raise ConfigError(f"The configuration {path} cannot be read: {error.strerror}.") from error
    try:
        plain = OmegaConf.to_container(content, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{not_complete}: {explain_value(error)} {hint}") from error
    if not isinstance(plain, dict) or not plain.get("run_folder"):
        raise ConfigError(f"{not_complete}: it names no run_folder. {hint}")
    return {str(key): value for key, value in plain.items()}


def move_to(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same run in another folder: paths of what it writes that lie in the old one move along, what it reads stays."""
    old = str(config["run_folder"]).rstrip("/")

    def moved(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: moved(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [moved(entry) for entry in value]
        inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/")) and key not in _READ_FROM_ANYWHERE
        return f"{folder}{value[len(old) :]}" if inside else value

    return config | {group: moved(config.get(group)) for group in _WRITE_TO_FOLDER if group in config} | {"run_folder": str(folder)}


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
