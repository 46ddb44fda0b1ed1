"""Checks of numbers that a user gives. Imports no torch."""

from __future__ import annotations

from math import isfinite

from lightning_3d.errors import ConfigError

LARGEST_SIZE = 2**40
"""Sizes above this are refused as slips: the largest real one, tokens in a data set, stays below."""


def check_sizes(**sizes: int | None) -> None:
    """Refuse sizes that are no positive whole numbers, or absurdly large. None is unknown and passes.

    Raises:
        ConfigError: names the size.
    """
    for name, size in sizes.items():
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int):
            raise ConfigError(f"{name} must be a whole number, not {size!r}.")
        if size < 1:
            raise ConfigError(f"{name} is {size}, but must be at least 1.")
        if size > LARGEST_SIZE:
            raise ConfigError(f"{name} is {size}, more than any real one. The largest accepted is {LARGEST_SIZE}.")


def check_number(name: str, value: float, *, least: float = 0.0, most: float | None = None) -> None:
    """Refuse a number that is NaN, infinite or out of range, such as a learning rate.

    Raises:
        ConfigError: names the option, its value and the range.
    """
    limits = f"at least {least:g}" if most is None else f"between {least:g} and {most:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} must be a number {limits}, not {value!r}.")
    if not isfinite(value) or value < least or (most is not None and value > most):
        raise ConfigError(f"{name} is {value}, but must be a finite number {limits}.")
