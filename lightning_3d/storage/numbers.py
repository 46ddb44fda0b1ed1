"""Sizes as people read them. Pure Python."""

from __future__ import annotations


def show_bytes(size: float) -> str:
    """Show bytes with three digits in the largest decimal unit that leaves a number of at least 1: `16.1 GB`, where 1 GB is 10**9 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.5:
            return _three_digits(size, unit)
        size /= 1000
    return _three_digits(size, "TB")


def gigabytes(size: float) -> str:
    """Show bytes in GB (10**9 bytes) with one decimal, for sizes that stand next to each other: `80.0 GB`."""
    return f"{size / 1e9:.1f} GB"


def _three_digits(value: float, unit: str) -> str:
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
