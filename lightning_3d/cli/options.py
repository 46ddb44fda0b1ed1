"""Options of a command: what is not an option is a Hydra override. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_3d.errors import ConfigError, listed

if TYPE_CHECKING:
    pass


def read_options(arguments: Sequence[str], known: Sequence[str], command: str) -> tuple[dict[str, str], list[str]]:
    """(`--name VALUE` or `--name=VALUE`, the rest).

    Raises:
        ConfigError: another name, or no value.
    """
    found: dict[str, str] = {}
    rest: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            rest.append(word)
            continue
        name, given, value = word[2:].partition("=")
        if name not in known:
            names = listed(f"--{name}" for name in known)
            raise ConfigError(f"{word} is no option of lightning-3d {command}. Those are {names}.")
        if not given:
            if not words:
                raise ConfigError(f"--{name} needs a value.")
            value = words.pop(0)
        found[name] = value
    return found, rest
