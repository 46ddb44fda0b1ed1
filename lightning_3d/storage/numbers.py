"""Sizes as people read them: memory in binary units (GiB), files and traffic in decimal ones (GB).
Pure Python."""

from __future__ import annotations


def show_bytes(size: float) -> str:
    """Show bytes of files or messages with three digits, in the largest decimal unit that leaves a
    number of at least 1: `16.1 GB`."""
    return _scaled(size, 1000, ("B", "kB", "MB", "GB", "TB"))


def show_memory(size: float) -> str:
    """Show bytes of memory with three digits, in the largest binary unit that leaves a number of at
    least 1: `16.1 GiB`."""
    return _scaled(size, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def gibibytes(size: float) -> str:
    """Show bytes of memory in GiB (2**30 bytes) with one decimal, for sizes that stand next to each
    other: `74.5 GiB`."""
    return f"{size / 2**30:.1f} GiB"


def gpu_memory(size: float) -> str:
    """Show the memory of a GPU in GiB, and as its vendor states it: `74.5 GiB (80 GB)`."""
    return f"{gibibytes(size)} ({size / 1e9:.0f} GB)"


def _scaled(size: float, factor: int, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(size) < 999.5:
            return _three_digits(size, unit)
        size /= factor
    return _three_digits(size, units[-1])


def _three_digits(value: float, unit: str) -> str:
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
