"""Paths of a configuration that is stored with its run: later commands may start in another folder.
Imports no torch."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any

_GROUPS = ("data", "model", "objective", "callbacks", "logger", "trainer", "profile")
_PATHS = (
    "train_path",
    "val_path",
    "root",
    "cache_dir",
    "dirpath",
    "save_dir",
    "default_root_dir",
    "offline_directory",
)
"""Keys whose values are paths."""
_PATHS_OR_NAMES = ("path", "tokenizer", "teacher", "pretrained", "profile", "resume")
"""Keys whose values may be something else, such as a name on the hub: paths if there is such a file
or folder."""


def absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make relative paths absolute in those groups of a configuration that have paths."""
    return {
        group: (
            _absolute(group, value, (*_PATHS, "path") if group == "callbacks" else _PATHS)
            if group in _GROUPS
            else value
        )
        for group, value in config.items()
    }


def absolute(path: str) -> str:
    """Return a path or a pattern from the root; a URL as it is."""
    path = os.path.expanduser(path)
    if "://" in path or os.path.isabs(path):
        return path
    is_pattern = glob.has_magic(path) and not os.path.lexists(path)
    return os.path.join(glob.escape(os.getcwd()) if is_pattern else os.getcwd(), path)


def _absolute(key: str, value: Any, paths: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {name: _absolute(str(name), entry, paths) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_absolute(key, entry, paths) for entry in value]
    if not isinstance(value, str) or not value:
        return value
    known = key in paths or (key in _PATHS_OR_NAMES and _exists(value))
    return absolute(value) if known else value


def _exists(path: str) -> bool:
    try:
        return os.path.exists(os.path.expanduser(path))
    except ValueError:  # no name that a file can have
        return False
