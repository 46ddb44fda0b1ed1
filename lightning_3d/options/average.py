"""Average of the weights of a run. Imports no torch."""

from __future__ import annotations

from lightning_3d.options.numbers import require_number


def check_decay(key: str, decay: object) -> None:
    """Refuse a decay that is not a number of at least 0 and below 1. Raises ConfigError."""
    require_number(
        key, decay, lambda value: 0 <= value < 1, "of at least 0 and below 1, for example 0.999"
    )
