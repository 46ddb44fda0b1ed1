"""Checks of keys and numbers that several options share. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.sizes import is_finite


def check_keys(what: str, config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse an unknown key, with the nearest known one."""
    known = list(known)
    for key in config:
        if key not in known:
            raise ConfigError(
                f"{what} has no option '{key}'. Its options are"
                f" {listed(known)}.{did_you_mean(str(key), known)}"
            )


def require_number(what: str, value: Any, holds: Callable[[float], bool], wanted: str) -> None:
    """Refuse a value that is not a finite number for which `holds` is true. `wanted` describes such
    numbers."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)
    if not number or not holds(value):
        raise ConfigError(f"{what} must be a number {wanted}; got {value!r}.")
