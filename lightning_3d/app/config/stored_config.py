"""The configuration that a run has stored, as its keys and classes are named now. Imports no
torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_MOVED = re.compile(r"^lightning_3d\.(?=(cli|evaluation|training)\.)")
"""Packages of version 0.1 that are in `lightning_3d.app`, in a `_target_`."""
_GONE = (("parallelism", "moe_exchange"), ("trainer", "lost_node_timeout"))
"""Keys of version 0.1 that nothing needs."""


def as_now(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored configuration with the classes of now and without keys that are gone."""
    found = {key: _renamed(value) for key, value in config.items()}
    for group, key in _GONE:
        if isinstance(found.get(group), dict):
            found[group].pop(key, None)
    data = found.get("data")
    if isinstance(data, dict) and data.get("name") == "instructions":
        data.pop("packing", None)
    return found


def _renamed(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _renamed(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_renamed(entry) for entry in value]
    if key == "_target_" and isinstance(value, str):
        return _MOVED.sub("lightning_3d.app.", value)
    return value
