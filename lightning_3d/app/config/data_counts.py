"""Numbers of workers and of samples for a validation in the group `data`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_3d.errors import ConfigError

_LEAST = {
    "num_workers": (0, "at least 0 (0 reads in the rank itself)"),
    "val_sequences": (1, "at least 1, or null for the whole split"),
}


def check_data_counts(data: Mapping[str, Any]) -> None:
    """Refuse counts that are too small. Other types than whole numbers are refused with all keys.

    Raises:
        ConfigError: with the key and what works.
    """
    for key, (least, wanted) in _LEAST.items():
        value = data.get(key)
        if isinstance(value, int) and value < least:
            raise ConfigError(f"data.{key} must be {wanted}; got {value}.")
