"""Folders of the configuration files: next to the package in a checkout, inside it in an installed
wheel. Imports nothing heavy.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[2]


def _folder(name: str) -> Path:
    inside, next_to = _PACKAGE / name, _PACKAGE.parent / name
    return inside if inside.is_dir() else next_to


def conf_folder() -> Path:
    """Return the folder of the Hydra groups, with `config.yaml`."""
    return _folder("conf")


def recipes_folder() -> Path:
    """Return the folder of the recipes: whole runs in one file each."""
    return _folder("recipes")
