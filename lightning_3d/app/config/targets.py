"""Which code a configuration may name. Imports no torch.

A `_target_` in a configuration is code that runs. A configuration of someone else, such as the
`config.yaml` of a run, must not run whatever it likes, so only classes of known packages may be
named there. The user adds packages with an environment variable, which no configuration can set,
and by writing a `_target_` on the command line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lightning_3d.errors import ConfigError, listed

ALLOW_VARIABLE = "LIGHTNING_3D_ALLOW_TARGETS"
"""Environment variable with more packages, modules or classes that configurations may name,
separated by commas."""

PACKAGES = ("lightning_3d", "lightning", "aim", "torchmetrics", "torch.optim", "torchao.optim")
"""Packages of which every class that a logger, a callback, the Trainer, an optimizer or a schedule
can be may be named."""

ARGUMENTS = (
    "datetime.timedelta",
    "pathlib.Path",
    "torch.device",
    "torch.profiler.schedule",
    "torch.profiler.tensorboard_trace_handler",
)
"""Names that may also be given, as values of arguments."""

_TYPED = re.compile(r"_target_['\"]?\s*[=:]\s*['\"]?([\w.]+)")


def check_targets(config: Mapping[str, Any], typed: Sequence[str] = ()) -> None:
    """Refuse a configuration that names code of an unknown package.

    What the command line names is allowed, for this process and those that it starts.

    Args:
        config: the configuration.
        typed: words of the command line.

    Raises:
        ConfigError: with the line that allows it.
    """
    allow_typed(typed)
    for key, name in targets_of(config):
        check_name(key, name, PACKAGES, ARGUMENTS)


def allow_typed(typed: Sequence[str]) -> None:
    """Allow the code that words of the command line name, in this process and those that it
    starts."""
    named = [name for word in typed for name in _TYPED.findall(word)]
    fresh = [name for name in named if not is_known(name) and not is_allowed(name)]
    if fresh:
        os.environ[ALLOW_VARIABLE] = ",".join([*allowed(), *dict.fromkeys(fresh)])


def check_name(key: str, name: Any, packages: Sequence[str], classes: Sequence[str] = ()) -> None:
    """Refuse the name of code that is in none of these packages, is none of these classes, and that
    the user has not allowed.

    Raises:
        ConfigError: with the line that allows it.
    """
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{key} must be the dotted name of a class; got {name!r}.")
    if name in classes or _begins(name, packages) or is_allowed(name):
        return
    package = name.partition(".")[0]
    what = f"classes of {listed(packages)}" if packages else listed(classes, last="or")
    raise ConfigError(
        f"{key}={name} names code of {package}, which a configuration may not run without your"
        f" consent. It may name {what}. If you trust {package}, set the environment variable"
        f" {ALLOW_VARIABLE}={package}, or give {key} on the command line."
    )


def is_known(name: str) -> bool:
    """Check whether a name belongs to a package that this package trusts, or is known as an
    argument."""
    return name in ARGUMENTS or _begins(name, PACKAGES)


def is_allowed(name: str) -> bool:
    """Check whether the user has allowed a name."""
    return _begins(name, allowed())


def allowed() -> list[str]:
    """Return the packages, modules and classes that the user has allowed."""
    return [name.strip() for name in os.environ.get(ALLOW_VARIABLE, "").split(",") if name.strip()]


def targets_of(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, name) of every `_target_` in a configuration, at any depth."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            below = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield below, entry
            else:
                yield from targets_of(entry, below)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from targets_of(entry, f"{key}[{index}]")


def _begins(name: str, packages: Iterable[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)
