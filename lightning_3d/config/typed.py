"""What the user has typed on the command line, as opposed to what files set. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf


@dataclass(frozen=True)
class Typed:
    """Overrides that the user has typed.

    Attributes:
        words: overrides, such as `trainer.max_steps=3`.
    """

    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DictConfig) -> Typed:
        """Return the overrides of a composed configuration; parameters of a sweep that a file sets are not among them."""
        swept = OmegaConf.select(config, "hydra.sweeper.params") or {}
        words = noted_overrides(config)
        return cls(tuple(word for word in words if word.partition("=")[0] not in swept))

    def sets(self, key: str) -> bool:
        """Check whether a word gives the value of a key, by itself or in a dict or a list."""
        for word in self.words:
            name, _, value = word.partition("=")
            name = name.lstrip("+")
            if name == key or (key.startswith((f"{name}.", f"{name}[")) and value.lstrip().startswith(("{", "["))):
                return True
        return False


def noted_overrides(config: DictConfig) -> list[str]:
    """Return the overrides that Hydra has noted in a configuration, as they were typed: interpolations in them are not resolved."""
    lists = [OmegaConf.select(config, f"hydra.overrides.{kind}") for kind in ("task", "hydra")]
    return [str(word) for words in lists if words is not None for word in OmegaConf.to_container(words, resolve=False) or ()]


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
