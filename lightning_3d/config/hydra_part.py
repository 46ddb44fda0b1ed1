"""Checks Hydra's own part of a configuration, before Hydra makes anything of it. Imports no torch.

Hydra creates its callbacks, launcher, sweeper and log handlers from the group `hydra`, which any configuration file can set. Files may name
Hydra's own classes, those of its plugins, and log handlers that write to the terminal or into the run folder. The command line may do more.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.config.compose import hydra_config
from lightning_3d.config.keys import explain_value
from lightning_3d.config.secrets import check_secrets, check_words
from lightning_3d.config.targets import ALLOW_VARIABLE, allow_typed, check_name, is_allowed, targets_of
from lightning_3d.config.typed import Typed, leaves, noted_overrides
from lightning_3d.config.written_paths import PLACES, SETTLED_PLACES, check_hydra_paths
from lightning_3d.errors import ConfigError, listed

_KINDS: dict[str, type] = {"callbacks": Callback, "launcher": Launcher, "sweeper": Sweeper}
_PACKAGES = ("lightning_3d", "hydra", "hydra_plugins")
_ARGUMENTS = ("optuna.samplers", "optuna.pruners")
"""Packages of classes that an argument of a plugin may be."""

_LOGGING = ("hydra_logging", "job_logging")
_LOG_CLASSES = (
    *("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "logging.Formatter", "logging.Filter"),
    *("logging.handlers.RotatingFileHandler", "logging.handlers.TimedRotatingFileHandler", "colorlog.ColoredFormatter"),
)
_LOG_OBJECTS = ("sys.stdout", "sys.stderr")
_LOG_CODE = ("()", "class", "factory", "queue", "listener", "_target_")
"""Keys whose value `logging.config.dictConfig` calls."""

_SHELL = ("setup", "srun", "srun_args", "sbatch", "additional_parameters", "python")
"""Keys of launchers that hold shell lines, or options that run programs."""

OUTPUT_MARK = "/output-folder-of-the-run"
"""Stands for the output folder of a run, which does not exist yet when Hydra's part is checked."""


def check_hydra(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuse Hydra's part of a composed configuration if it runs code, or writes outside the run folder, without the user's consent.

    Interpolations in what Hydra makes objects of are replaced by their values, so that what was checked is what is made.

    Args:
        config: configuration with the group `hydra`, which is changed.
        overrides: all overrides of the command line, or of a job of a sweep.

    Raises:
        ConfigError: with what to do instead.
    """
    if Counter(noted_overrides(config)) != Counter(overrides):
        raise ConfigError("hydra.overrides must not be set by a configuration file: it lists what the command line says. Remove it.")
    typed = Typed.of(config)
    check_words(overrides)
    allow_typed(typed.words)
    values = _resolve(config)
    for section, kind in _KINDS.items():
        _check_objects(section, kind, values[section])
    for section in _LOGGING:
        _check_logging(f"hydra.{section}", values[section] or {}, typed)
    _check_launcher(values["launcher"], typed)
    _check_environment(config.hydra.job.env_set, typed)
    check_hydra_paths(config, values, typed, OUTPUT_MARK)
    check_secrets({"hydra": {**values, "job": {"env_set": OmegaConf.to_container(config.hydra.job.env_set)}}})
    _settle(config, values)


def check_search_path(paths: Any) -> None:
    """Refuse `hydra.searchpath` of a file if Hydra would import a package for it.

    Raises:
        ConfigError: with what to do instead.
    """
    for path in paths if isinstance(paths, Sequence) and not isinstance(paths, str) else ():
        if str(path).startswith("pkg://"):
            check_name("hydra.searchpath", str(path).removeprefix("pkg://").strip("/").replace("/", "."), _PACKAGES)


def _resolve(config: DictConfig) -> dict[str, Any]:
    """Return what Hydra makes objects of, and the paths of its files, without interpolations. What is not known yet has marks."""
    copied = copy.deepcopy(config)
    values: dict[str, Any] = {}
    for node in (copied, copied.hydra, copied.hydra.runtime, copied.hydra.job):
        OmegaConf.set_readonly(node, False)
    with open_dict(copied), hydra_config(copied):
        copied.hydra.runtime.output_dir = OUTPUT_MARK
        for key, mark in (("num", 0), ("id", "0")):
            if OmegaConf.is_missing(copied.hydra.job, key):
                copied.hydra.job[key] = mark
        for section in (*_KINDS, *_LOGGING, *PLACES):
            try:
                node = OmegaConf.select(copied, f"hydra.{section}")
                values[section] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            except OmegaConfBaseException as error:
                raise ConfigError(f"hydra.{section} cannot be resolved: {explain_value(error)}") from error
            _refuse_escaped(f"hydra.{section}", values[section])
    return values


def _refuse_escaped(key: str, value: Any) -> None:
    """Refuse a text that would be resolved once more when Hydra uses it."""
    for below, text in leaves(value, key):
        if isinstance(text, str) and "${" in text:
            raise ConfigError(f"{below} must not contain an escaped interpolation (\\${{...}}); got {text!r}. Write the value itself.")


def _settle(config: DictConfig, values: Mapping[str, Any]) -> None:
    """Replace interpolations in what Hydra makes objects of by the values that were checked."""
    with read_write(config), open_dict(config), read_write(config.hydra.job):
        for section in (*_KINDS, *_LOGGING, *SETTLED_PLACES):
            group, _, key = section.rpartition(".")
            holder = config.hydra[group] if group else config.hydra
            if "${" in repr(OmegaConf.to_container(holder, resolve=False)[key]):  # type: ignore[index,call-overload]
                holder[key] = _unmarked(values[section])


def _unmarked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _unmarked(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_unmarked(entry) for entry in value]
    return value.replace(OUTPUT_MARK, "${hydra.runtime.output_dir}") if isinstance(value, str) else value


def _check_objects(section: str, kind: type, value: Any) -> None:
    """Check the classes that a section names, at any depth."""
    made = {f"hydra.{section}": value}
    if section == "callbacks" and (value is None or isinstance(value, Mapping)):
        made = {f"hydra.{section}.{name}": entry for name, entry in (value or {}).items() if entry is not None}
    for key, entry in made.items():
        if not isinstance(entry, Mapping) or "_target_" not in entry:
            raise ConfigError(f"{key} must have a _target_, which names its class; got {entry!r}.")
    tops = [f"{key}._target_" for key in made]
    for key, name in targets_of(value, f"hydra.{section}"):
        packages = _PACKAGES if key in tops else _ARGUMENTS
        check_name(key, name, packages)
        if is_allowed(name):
            continue
        found = _found(key, name)
        if not isinstance(found, type) or not found.__module__.startswith(packages):
            raise ConfigError(f"{key} must name a class of {listed(packages)}; got {name}.")
        if key in tops and not issubclass(found, kind):
            raise ConfigError(f"{key} must name a class that is a {kind.__name__} of Hydra; got {name}.")
    function = value.get("custom_search_space") if section == "sweeper" and isinstance(value, Mapping) else None
    if function is not None:  # Optuna's sweeper calls it
        check_name("hydra.sweeper.custom_search_space", function, ())


def _found(key: str, name: str) -> Any:
    """Return what a dotted name of a trusted package means."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise ConfigError(f"{key} names {name}, which does not exist or cannot be imported: {error}.") from error


def _check_logging(section: str, value: Any, typed: Typed) -> None:
    """Check what `logging.config.dictConfig` calls, imports and formats."""
    for key, text in leaves(value, section):
        if typed.sets(key):
            continue
        name = key.rpartition(".")[2]
        if name in _LOG_CODE:
            check_name(key, text, (), _LOG_CLASSES)
        elif isinstance(text, str) and text.startswith("ext://") and text.removeprefix("ext://") not in _LOG_OBJECTS:
            check_name(key, text.removeprefix("ext://"), (), _LOG_OBJECTS)
        elif name == "style" and text == "{":
            raise ConfigError(f"{key} must be % or $; got {text}, whose fields can read any object of the program.")


def _check_launcher(value: Any, typed: Typed) -> None:
    """Refuse shell lines of a file, and texts that would become lines of a job script."""
    for key, text in leaves(value, "hydra.launcher"):
        option = key.split(".")[2].partition("[")[0] if key.count(".") > 1 else ""
        if isinstance(text, str) and len(text.splitlines()) > 1 and not typed.sets(key):
            raise ConfigError(f"{key} must be one line; got {text!r}.")
        if option in _SHELL and text not in (None, "") and not typed.sets(key) and not is_allowed(f"hydra.launcher.{option}"):
            raise ConfigError(
                f"{key}={text} of a configuration file is a part of a command that runs on the nodes. Give it on the command line, or,"
                f" if you trust the file, set the environment variable {ALLOW_VARIABLE}=hydra.launcher.{option}."
            )


def _check_environment(variables: Any, typed: Typed) -> None:
    """Refuse environment variables of a file: they can load code into the ranks, and allow what this check refuses."""
    if not isinstance(variables, Mapping):
        raise ConfigError(f"hydra.job.env_set must be a group of variables, as in +hydra.job.env_set.NAME=value; got {variables!r}.")
    for name, value in variables.items():
        key = f"hydra.job.env_set.{name}"
        if not typed.sets(key) and value != os.environ.get(str(name)):
            raise ConfigError(
                f"{key} of a configuration file would set an environment variable of the run, which can load code. Set it in the shell, or"
                " give it on the command line."
            )
