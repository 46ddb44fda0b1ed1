"""Checks of numbers in options. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from lightning_3d.errors import ConfigError

LARGEST_SIZE = 2**40
"""Larger sizes are refused as typing errors: the largest real one, tokens in a data set, stays
below."""


def check_sizes(**sizes: int | None) -> None:
    """Refuse sizes that are not positive whole numbers or are implausibly large. None means unknown
    and passes.

    Raises:
        ConfigError: with the name of the size.
    """
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigError(f"{name} must be a whole number; got {size!r}.")
        if size < 1:
            raise ConfigError(f"{name} must be at least 1; got {size}.")
        if size > LARGEST_SIZE:
            raise ConfigError(f"{name} must be at most {LARGEST_SIZE}; got {size}.")


def is_finite(value: float) -> bool:
    """Check whether a number is finite as a float: whole numbers may be too large for one."""
    try:
        return isfinite(value)
    except OverflowError:
        return False


def check_number(name: str, value: float, *, least: float = 0.0, most: float | None = None) -> None:
    """Refuse a number that is NaN, infinite or out of range, such as a learning rate.

    Raises:
        ConfigError: with the option, its value and the range.
    """
    limits = f"of at least {least:g}" if most is None else f"between {least:g} and {most:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number {limits}; got {value!r}.")
    if not is_finite(value) or value < least or (most is not None and value > most):
        raise ConfigError(f"{name} must be a finite number {limits}; got {value}.")


def require_number(what: str, value: Any, holds: Callable[[float], bool], wanted: str) -> None:
    """Refuse a value that is not a finite number for which `holds` is true. `wanted` describes such
    numbers."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value)
    if not number or not holds(value):
        raise ConfigError(f"{what} must be a number {wanted}; got {value!r}.")


def check_decay(key: str, decay: object) -> None:
    """Refuse a decay of an average of weights that is not a number of at least 0 and below 1.
    Raises ConfigError."""
    wanted = "of at least 0 and below 1, for example 0.999"
    require_number(key, decay, lambda value: 0 <= value < 1, wanted)
