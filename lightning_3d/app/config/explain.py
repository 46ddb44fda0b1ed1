"""Errors of Hydra and OmegaConf about a wrong command line, as one message with the nearest value
that works."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from lightning_3d.app.config.files import conf_folder
from lightning_3d.app.config.keys import explain_value
from lightning_3d.errors import ConfigError, Lightning3DError, did_you_mean, install, listed
from lightning_3d.layout.layout import Layout
from lightning_3d.options.precision import unknown_precision

_HYDRA = Path(hydra.__file__).parent


def is_composition_error(error: Exception) -> bool:
    """Check whether an error was raised because the command line or a configuration file is wrong.

    Hydra also raises plain ValueErrors; they count when its own code raised them, or when it
    configured the logs.
    """
    if isinstance(error, (HydraException, OmegaConfBaseException, Lightning3DError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    own = [Path(frame.filename).is_relative_to(_HYDRA) for frame in frames]
    logs = any(
        frame.name == "configure_log" for frame, is_own in zip(frames, own, strict=True) if is_own
    )
    return (isinstance(error, ValueError) and bool(own) and own[-1]) or logs


def explain(error: Exception) -> Lightning3DError:
    """Return the error to show for one that `is_composition_error` accepts."""
    if isinstance(error, Lightning3DError):
        return error
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_option(error)
    if isinstance(error, OmegaConfBaseException):
        return explain_value(error)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return explain_value(error.__cause__)
    text = " ".join(str(error).split()) or type(error).__name__
    if "Got NoneType" in text:
        return ConfigError(
            f"{text}. To remove a group, use ~GROUP; for logger and callbacks you can also use"
            " none."
        )
    if "Got int" in text or "Got float" in text or "Got bool" in text:
        return ConfigError(
            "The value of a group must be the name of one of its configurations, for example"
            " parallelism=dp8 or precision=fp32; got a number or a boolean."
        )
    if text.startswith("Primary config module"):
        return ConfigError(
            "--config-path must be an absolute path, for example $PWD/mine. To add a folder to this"
            " program's own, use --config-dir."
        )
    if isinstance(error, OverrideParseException):
        return ConfigError(f'Cannot parse the override "{error.override}": {text}')
    return ConfigError(text)


def explain_sweep(error: Exception, arguments: Sequence[str]) -> Lightning3DError:
    """Return the error to show for a command line that may be a sweep.

    Hydra composes it once without the groups that the sweep varies, so the keys of these groups do
    not exist then.
    """
    refusal = explain(error)
    swept = [line.partition("=")[0] for line in arguments if "," in line.partition("=")[2]]
    groups = [key for key in swept if "." not in key and not key.startswith(("-", "+", "~"))]
    if groups and isinstance(error.__cause__ or error, (ConfigKeyError, ConfigAttributeError)):
        return ConfigError(
            f"{refusal} If the key belongs to {listed(groups, last='or')}, which this sweep varies,"
            " use ++KEY=VALUE."
        )
    return refusal


def _no_such_option(error: MissingConfigException) -> Lightning3DError:
    """Explain that a group has no configuration of this name. For a layout, the parser explains
    what is wrong."""
    group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
    options = [str(option) for option in error.options or ()]
    if group == "parallelism":
        try:
            Layout.parse(name)
        except Lightning3DError as refusal:
            return refusal
    if group == "precision":
        return unknown_precision(name)
    if (group, name) == ("hydra/sweeper", "optuna"):
        return ConfigError(
            "hydra/sweeper=optuna and hparams_search need the package hydra-optuna-sweeper."
            f" {install('optuna')}."
        )
    near = did_you_mean(name, options)
    by_number = ""
    if group == "cluster":
        # Hydra has none for a default of a default
        options = options or [file.stem for file in (conf_folder() / group).glob("*.yaml")]
        by_number = " Append the number of nodes and the GPUs of each node, for example h100_32x8."
    what = f'There is no {group} "{name}".' if group else f'There is no configuration "{name}".'
    return ConfigError(
        f"{what}{near}"
        + (f" Available: {', '.join(sorted(options))}." if options else "")
        + by_number
    )
