"""What the user has typed on the command line, as opposed to what files set. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf


def typed_words(config: DictConfig) -> list[str]:
    """Return the overrides of a composed configuration, as they were typed; parameters of a sweep
    that a file sets are not among them."""
    swept = OmegaConf.select(config, "hydra.sweeper.params") or {}
    lists = [OmegaConf.select(config, f"hydra.overrides.{kind}") for kind in ("task", "hydra")]
    words = [
        str(word)
        for words in lists
        if words is not None
        for word in OmegaConf.to_container(words, resolve=False) or ()
    ]
    return [word for word in words if word.partition("=")[0] not in swept]


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of everything in nested dicts and lists that is not one itself."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from leaves(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from leaves(entry, f"{key}[{index}]")
    else:
        yield key, value
