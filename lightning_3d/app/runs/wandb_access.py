"""Check that Weights & Biases can be used on this machine, before anything is started. Imports
neither torch nor wandb."""

from __future__ import annotations

import configparser
import importlib.util
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_3d.errors import ConfigError, install
from lightning_3d.storage.user_cache import home

SWEEP_VARIABLE = "LIGHTNING_3D_SWEEP"
"""Environment variable with the name of the sweep, for its jobs."""

_HOST = "https://api.wandb.ai"
_NOT_ONLINE = ("offline", "dryrun", "disabled")
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def wandb_entries(loggers: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Select the entries of the group `logger` that create a logger of Weights & Biases,
    Lightning's or ours."""
    named = {str(name): entry for name, entry in (loggers or {}).items()}
    return {
        name: entry
        for name, entry in named.items()
        if entry and str(entry.get("_target_")).endswith("WandbLogger")
    }


def require_access(loggers: Mapping[str, Any] | None) -> None:
    """Run `check_access` for each logger of Weights & Biases in the group `logger`."""
    for name, entry in wandb_entries(loggers).items():
        check_access(bool(entry.get("offline")), f"logger.{name}.offline=true")


def check_access(offline: bool, otherwise: str) -> None:
    """Refuse a run for which wandb would ask at a terminal, or wait.

    Args:
        offline: whether the run is only written to the disk.
        otherwise: option that makes a run offline, for the message.

    Raises:
        ConfigError: the package is not installed, or there is no API key for an online run.
    """
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f"logger=wandb needs the package wandb. {install('wandb')}, or omit logger=wandb."
        )
    if is_offline(offline):
        return
    settings, url = _settings(), _url()
    if not (
        any(os.environ.get(name) for name in _KEYS)
        or settings.get("api_key")
        or _in_netrc(urlsplit(url).hostname or url)
    ):
        raise ConfigError(
            f"Weights & Biases has no API key for {url} on this machine. Set WANDB_API_KEY or run"
            f" `wandb login`. To write the run only to disk, set {otherwise} or WANDB_MODE=offline."
        )


def is_offline(offline: bool) -> bool:
    """Check whether a run is written to the disk only, or not at all: by its argument or by the
    settings of wandb."""
    mode = os.environ.get("WANDB_MODE") or _settings().get("mode") or ""
    return (
        offline
        or mode in _NOT_ONLINE
        or os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true")
    )


def _url() -> str:
    return os.environ.get("WANDB_BASE_URL") or _settings().get("base_url") or _HOST


def _settings() -> dict[str, str]:
    """Read the settings that `wandb offline` and `wandb login --host` leave, of the user and of the
    working directory, which wins."""
    folder = os.environ.get("WANDB_CONFIG_DIR") or home() / ".config" / "wandb"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([Path(folder) / "settings", Path("wandb") / "settings"])
    except configparser.Error:  # wandb reports what is wrong with them
        return {}
    return dict(parser["default"]) if parser.has_section("default") else {}


def _in_netrc(host: str) -> bool:
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [home() / ".netrc", home() / "_netrc"]:
        try:
            if path.is_file() and netrc.netrc(path).authenticators(host) is not None:
                return True
        except (netrc.NetrcParseError, OSError):
            return True  # wandb reports what is wrong with it
    return False
