"""Groups of parameters with a learning rate or a weight decay of their own, by patterns of their
names. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Any

from lightning_3d.errors import ConfigError, did_you_mean, listed
from lightning_3d.layout.sizes import require_number

REGULAR = "re:"
"""Prefix of a pattern that is a regular expression; other patterns are those of a shell
(`fnmatch`)."""
KEY = "optimizer.groups"
_KEYS = ("pattern", "lr", "lr_scale", "weight_decay")
_NEAREST = 3

Names = Sequence[str]
"""All names of one parameter. A tied one has several."""


@dataclass(frozen=True)
class ParameterGroup:
    """An entry of `optimizer.groups`.

    Attributes:
        patterns: a parameter whose whole name matches one of them belongs to the group.
        lr: its learning rate; None: that of the optimizer.
        lr_scale: factor on the optimizer's learning rate; None: 1.
        weight_decay: its weight decay, also of the kinds in `optimizer.no_decay`; None: that of the
            optimizer.
    """

    patterns: tuple[str, ...]
    lr: float | None = None
    lr_scale: float | None = None
    weight_decay: float | None = None

    def matches(self, names: Names) -> bool:
        """Return whether a parameter belongs to the group, if no earlier group has it."""
        return any(matches(pattern, name) for pattern in self.patterns for name in names)


def read_groups(entries: Any) -> tuple[ParameterGroup, ...]:
    """Read `optimizer.groups`.

    Raises:
        ConfigError: an entry that cannot be used.
    """
    if entries is None:
        return ()
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise ConfigError(
            f'{KEY} must be a list, for example [{{pattern: "*.embed_tokens.*", lr_scale: 0.1}}];'
            f" got {entries!r}."
        )
    return tuple(_read_group(f"{KEY}[{index}]", entry) for index, entry in enumerate(entries))


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a whole name."""
    if pattern.startswith(REGULAR):
        return re.fullmatch(pattern.removeprefix(REGULAR), name) is not None
    return fnmatchcase(name, pattern)


def assign(groups: Sequence[ParameterGroup], parameters: Iterable[Names]) -> list[int | None]:
    """Find the group of each parameter: the first one that matches; None: no group does."""
    return [
        next((index for index, group in enumerate(groups) if group.matches(names)), None)
        for names in parameters
    ]


def require_matches(groups: Sequence[ParameterGroup], parameters: Sequence[Names]) -> None:
    """Refuse groups that change nothing.

    Args:
        groups: result of `read_groups`.
        parameters: the names of each trained parameter of the whole model.

    Raises:
        ConfigError: a pattern matches no parameter, with the nearest names; or earlier groups have
            all parameters of a group.
    """
    for index, group in enumerate(groups):
        require_pattern_matches(f"{KEY}[{index}]", group.patterns, parameters)
    used = set(assign(groups, parameters))
    for index, group in enumerate(groups):
        if index not in used:
            raise ConfigError(
                f"{KEY}[{index}] has no parameters: earlier groups match everything that"
                f" {listed(group.patterns)} matches. A parameter belongs to the first group that"
                " matches it. Put this group first, or remove it."
            )


def require_pattern_matches(key: str, patterns: Sequence[str], parameters: Sequence[Names]) -> None:
    """Refuse patterns that match no parameter.

    Args:
        key: the key that has them.
        patterns: the patterns.
        parameters: see `require_matches`.

    Raises:
        ConfigError: with the nearest names.
    """
    for pattern in patterns:
        if not any(matches(pattern, name) for names in parameters for name in names):
            raise ConfigError(
                f'{key}: the pattern "{pattern}" matches no trained parameter of the model. A'
                " pattern matches a whole name. The nearest names are"
                f" {listed(nearest(pattern, [name for names in parameters for name in names]))}."
            )


def matching(entries: Any, parameters: Sequence[Names]) -> list[Any]:
    """Return the entries of `optimizer.groups` that have parameters in a smaller model."""
    kept: list[Any] = []
    for entry in entries or ():
        try:
            require_matches(read_groups([*kept, entry]), parameters)
        except ConfigError:
            continue
        kept.append(entry)
    return kept


def nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Find the names that look most like a pattern, one of each kind of layer."""
    wanted = re.sub(r"[*?\\^$\[\]()|+]|re:", "", pattern).strip(".")
    kinds: dict[str, str] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\.\d+\.", ".N.", name), name)
    length = wanted.count(".") + 1

    def likeness(name: str) -> float:
        parts = name.split(".")
        tails = (
            ".".join(parts[start : start + length])
            for start in range(max(1, len(parts) - length + 1))
        )
        return max(SequenceMatcher(None, wanted, tail).ratio() for tail in tails)

    return sorted(kinds.values(), key=likeness, reverse=True)[:_NEAREST]


def check_keys(what: str, config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse an unknown key, with the nearest known one."""
    known = list(known)
    for key in config:
        if key not in known:
            raise ConfigError(
                f"{what} has no option '{key}'. Its options are"
                f" {listed(known)}.{did_you_mean(str(key), known)}"
            )


def _read_group(key: str, entry: Any) -> ParameterGroup:
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f'{key} must be a mapping, for example {{pattern: "*.embed_tokens.*", lr_scale: 0.1}};'
            f" got {entry!r}."
        )
    check_keys(key, entry, _KEYS)
    patterns = read_patterns(f"{key}.pattern", entry.get("pattern") or None)
    for name in ("lr", "lr_scale", "weight_decay"):
        if entry.get(name) is not None:
            require_number(f"{key}.{name}", entry[name], lambda x: x >= 0, "of at least 0")
    numbers = {
        name: float(entry[name])
        for name in ("lr", "lr_scale", "weight_decay")
        if entry.get(name) is not None
    }
    if not numbers:
        raise ConfigError(f"{key} changes nothing. Give it lr, lr_scale or weight_decay.")
    if {"lr", "lr_scale"} <= numbers.keys():
        raise ConfigError(
            f"{key} has both lr and lr_scale. Give it lr, or lr_scale, which is a factor on"
            " optimizer.lr."
        )
    return ParameterGroup(patterns, **numbers)


def read_patterns(key: str, given: Any) -> tuple[str, ...]:
    """Read a pattern of parameter names or a list of patterns.

    Raises:
        ConfigError: something else, or a regular expression that cannot be read.
    """
    patterns = (
        (given,)
        if isinstance(given, str)
        else tuple(given)
        if isinstance(given, Sequence)
        else (None,)
    )
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ConfigError(
            f"{key} must be a pattern of parameter names or a list of patterns, for example"
            f' "*.bias"; got {given!r}.'
        )
    for pattern in patterns:
        _check_pattern(key, pattern)
    return patterns


def _check_pattern(key: str, pattern: str) -> None:
    if not pattern.startswith(REGULAR):
        return
    try:
        re.compile(pattern.removeprefix(REGULAR))
    except re.error as error:
        raise ConfigError(f'{key}: "{pattern}" is not a regular expression: {error}.') from error
