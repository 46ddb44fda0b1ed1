"""Read the frozen `config.yaml` of a run folder, and move it to another folder. Imports no
torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.app.config.keys import explain_value
from lightning_3d.app.config.stored_config import as_now
from lightning_3d.app.runs.folder import CONFIG_FILE
from lightning_3d.errors import ConfigError
from lightning_3d.storage.json_file import read_text

_WRITE_TO_FOLDER = ("logger", "callbacks", "trainer")
_READ_FROM_ANYWHERE = ("resume",)


def read_frozen(path: Path) -> dict[str, Any]:
    """Read a configuration file as dicts and lists.

    Raises:
        ConfigError: it does not exist, is not YAML, or is not the configuration of a run.
    """
    not_complete = f"{path} is not a complete configuration of a run"
    hint = (
        f"Use the {CONFIG_FILE} that lightning-3d train wrote into the folder of a run, not the one"
        " in its .hydra folder."
    )
    try:
        read_text(path)
        # reads numbers as Hydra does: 1e-5 is a string for other readers of YAML
        content = OmegaConf.load(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"Cannot read the configuration {path}: it is not text.") from error
    except OmegaConfBaseException as error:  # an interpolation that cannot be read
        raise ConfigError(f"{not_complete}: {explain_value(error)} {hint}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    except OSError as error:
        if error.strerror is None:  # OmegaConf: a lone number or word
            raise ConfigError(f"{not_complete}: it has no keys. {hint}") from error
        raise ConfigError(f"Cannot read the configuration {path}: {error.strerror}.") from error
    try:
        plain = OmegaConf.to_container(content, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{not_complete}: {explain_value(error)} {hint}") from error
    if not isinstance(plain, dict) or not plain.get("run_folder"):
        raise ConfigError(f"{not_complete}: it has no run_folder. {hint}")
    # Hydra's own part is not in a frozen configuration; in one of a stranger it would look like a
    # command line.
    return as_now({str(key): value for key, value in plain.items() if key != "hydra"})


def move_to(config: dict[str, Any], folder: Path, *, whole: bool = False) -> dict[str, Any]:
    """Move a run to another folder: paths in the old folder that it writes are changed.

    Args:
        whole: whether the files in the old folder are in the new one, so that paths that it reads
            are changed too.
    """
    old = str(config["run_folder"]).rstrip("/")

    def moved(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: moved(entry, name) for name, entry in value.items()}
        if isinstance(value, list):
            return [moved(entry) for entry in value]
        inside = (
            isinstance(value, str)
            and (value == old or value.startswith(f"{old}/"))
            and (whole or key not in _READ_FROM_ANYWHERE)
        )
        return f"{folder}{value[len(old) :]}" if inside else value

    groups = config if whole else [group for group in _WRITE_TO_FOLDER if group in config]
    return config | {group: moved(config[group]) for group in groups} | {"run_folder": str(folder)}


def frozen_text(frozen: dict[str, Any]) -> str:
    """Write a configuration as it is saved in a run folder, for any reader of YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(frozen))
