"""A configuration file writes into the run folder only; the command line and the environment may name other places. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.stored_paths import absolute
from lightning_3d.config.typed import Typed, leaves
from lightning_3d.errors import ConfigError

ALLOW_VARIABLE = "LIGHTNING_3D_ALLOW_PATHS"
"""Environment variable with more folders and URLs to which configurations may write, separated by commas; by newlines if it has any."""

PLACES = ("run.dir", "sweep.dir", "sweep.subdir", "output_subdir", "job.name")
"""Keys of Hydra that place files."""
SETTLED_PLACES = ("run.dir", "sweep.dir", "output_subdir", "job.name")
"""Those that are the same for all jobs of a sweep."""
_OF_A_JOB = re.compile(r"\$\{hydra[.:]job\.(num|id|override_dirname)\}")
"""Interpolations that `hydra.sweep.subdir` of a file may have: what others give may change after the check."""

_RUN_FOLDER = "${hydra:runtime.output_dir}"
_MARK = "/run-folder"
"""Stands for the run folder of a configuration that does not name it yet."""

_GROUPS = ("logger", "callbacks", "trainer.extra")
"""Groups of objects, which may write."""
_PATH_KEY = re.compile(r"(?i)(.*_)?(dir|dirpath|directory|folder|path|file|repo|root|uri|location|storage|dir_name)|.*dirpath|_args_")
"""Arguments that are relative to the folder in which a command starts. Of others, absolute paths, URLs and `..` leave the run folder."""
_URL = re.compile(r"(?i)[a-z][a-z0-9+.-]*://|(file|sqlite):")
_READ = ("resume", "ckpt_path", "_target_")


def check_paths(config: DictConfig, resolved: Mapping[str, Any], typed: Typed) -> None:
    """Refuse a file that writes outside the run folder.

    Args:
        config: composed configuration, or a frozen one.
        resolved: the same without interpolations, whose run folder is `folder_of(config)`.
        typed: what the command line sets. It is allowed, in this process and those that it starts.

    Raises:
        ConfigError: with the place that works.
    """
    folder = folder_of(config)
    if not folder:
        if resolved["trainer"]["dry"]:  # nothing is written
            return
        raise ConfigError(f"run_folder must be {_RUN_FOLDER} in a file; got nothing. A run needs a folder. Add run_folder: {_RUN_FOLDER}.")
    raw = str(OmegaConf.to_container(config, resolve=False)["run_folder"])  # type: ignore[index,call-overload]
    if "hydra" in config and raw != _RUN_FOLDER and not typed.sets("run_folder"):
        raise ConfigError(f"run_folder must be {_RUN_FOLDER} in a file; got {raw}. Set hydra.run.dir=... on the command line.")
    _check_written(resolved, folder, typed)


def check_frozen_paths(frozen: Mapping[str, Any]) -> None:
    """Refuse a complete configuration that writes outside its run folder, which is known now: paths may depend on its name.

    Raises:
        ConfigError: with the place that works.
    """
    if frozen.get("run_folder"):
        _check_written(frozen, str(frozen["run_folder"]), Typed())


def _check_written(resolved: Mapping[str, Any], folder: str, typed: Typed) -> None:
    for key, value in _written(resolved):
        if typed.sets(key):
            allow(value)
        elif leaves_folder(value, key, folder) and not _is_allowed(value) and not _is_allowed(value.replace(folder, _MARK)):
            shown = value.replace(_MARK, "${run_folder}")
            raise ConfigError(
                f"{key}={shown} of a configuration file would be written outside the run folder. Use {_inside(value)}, give {key} on the"
                f" command line, or, if you trust the file, set the environment variable {ALLOW_VARIABLE}={shown}."
            )


def folder_of(config: DictConfig) -> str:
    """Return the run folder of a configuration; a mark where it is chosen later, and an empty string where nothing is written."""
    raw = OmegaConf.to_container(config, resolve=False).get("run_folder")  # type: ignore[union-attr]
    return "" if not raw else _MARK if "${" in str(raw) else str(raw)


def check_hydra_paths(config: DictConfig, values: Mapping[str, Any], typed: Typed, output: str) -> None:
    """Refuse a file that lets Hydra write elsewhere: `hydra.run.dir`, its files and its logs.

    Args:
        config: composed configuration.
        values: keys of Hydra without interpolations.
        typed: what the command line sets.
        output: what stands for the output folder in `values`.

    Raises:
        ConfigError: with the place that works.
    """
    for place in PLACES:
        key, value = f"hydra.{place}", values[place]
        if value is None or typed.sets(key):
            continue
        within = "the folder in which the command is started" if place in ("run.dir", "sweep.dir") else "the run folder"
        slash = place == "job.name" and "/" in str(value)
        if slash or _escapes(str(value)):
            what = "a name without /" if place == "job.name" else "a relative path without .."
            raise ConfigError(f"{key}={value} of a configuration file leaves {within}. Use {what}, or give {key} on the command line.")
    subdir = str(OmegaConf.to_container(config.hydra.sweep, resolve=False)["subdir"])  # type: ignore[index,call-overload]
    if "${" in _OF_A_JOB.sub("", subdir) and not typed.sets("hydra.sweep.subdir"):
        raise ConfigError(
            f"hydra.sweep.subdir={subdir} of a configuration file may only contain ${{hydra.job.num}}, ${{hydra.job.id}} and"
            " ${hydra.job.override_dirname}. Use one of them, or give hydra.sweep.subdir on the command line."
        )
    sweeper = values["sweeper"] if isinstance(values["sweeper"], Mapping) else {}
    if sweeper.get("storage") is not None and not typed.sets("hydra.sweeper.storage"):
        raise ConfigError("hydra.sweeper.storage of a configuration file would write outside the run folder. Give it on the command line.")
    for section in ("job_logging", "hydra_logging", "launcher"):
        for key, value in leaves(values[section], f"hydra.{section}"):
            name = key.rpartition(".")[2]
            inside = f"{output}/" if section != "launcher" else str(values["sweep.dir"])
            if name not in ("filename", "submitit_folder") or not isinstance(value, str) or typed.sets(key):
                continue
            if not value.startswith(inside) or _escapes(value.removeprefix(inside).lstrip("/")):
                shown = value.replace(output, "${hydra.runtime.output_dir}")
                raise ConfigError(
                    f"{key}={shown} of a configuration file would be written outside the run folder. Use"
                    f" ${{hydra.runtime.output_dir}}/{PurePosixPath(value).name}, or give {key} on the command line."
                )


def leaves_folder(value: str, key: str, folder: str) -> bool:
    """Check whether an argument is a place outside a folder."""
    if value == folder or (value.startswith(f"{folder}/") and not _escapes(value[len(folder) + 1 :])):
        return False
    name = re.sub(r"(\[\d+\])+$", "", key).rpartition(".")[2]
    return _escapes(value) or _URL.match(value) is not None or _PATH_KEY.fullmatch(name) is not None


def _escapes(value: str) -> bool:
    """Check whether a path is absolute, in a home folder, or goes up."""
    return value.startswith(("/", "~", "\\")) or ".." in re.split(r"[/\\]", value) or "\0" in value


def _written(resolved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of the arguments that may be places to which a run writes."""
    for group in _GROUPS:
        content: Any = resolved
        for part in group.split("."):
            content = content.get(part) if isinstance(content, Mapping) else None
        for key, value in leaves(content, group):
            name = re.sub(r"(\[\d+\])+$", "", key).rpartition(".")[2]
            if isinstance(value, str) and value and name not in _READ:
                yield key, value
    cache = (resolved.get("data") or {}).get("cache_dir")
    if isinstance(cache, str) and cache:
        yield "data.cache_dir", cache


def _inside(value: str) -> str:
    name = re.sub(r"[^\w.-]", "", PurePosixPath(value).name) or "files"
    return f"${{run_folder}}/{name.strip('.') or 'files'}"


def allow(value: str) -> None:
    """Allow a place in this process and those that it starts."""
    if not _is_allowed(value):
        given = [value.rstrip("/"), absolute(value).rstrip("/")]  # the second is what is stored with the run
        os.environ[ALLOW_VARIABLE] = "".join(f"{place}\n" for place in dict.fromkeys([*_allowed(), *given]))


def _is_allowed(value: str) -> bool:
    return any(value == place or (value.startswith(f"{place}/") and ".." not in value.split("/")) for place in _allowed())


def _allowed() -> list[str]:
    given = os.environ.get(ALLOW_VARIABLE, "")
    return [place.strip().rstrip("/") for place in given.split("\n" if "\n" in given else ",") if place.strip()]
