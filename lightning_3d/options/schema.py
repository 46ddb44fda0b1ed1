"""Declaration of options: one field has the name, type, default, help and check of an option.
Imports no torch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, field, fields
from textwrap import fill
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, get_type_hints

from lightning_3d.errors import ConfigError, Lightning3DError, did_you_mean, listed
from lightning_3d.layout.sizes import check_number

P = ParamSpec("P")
Group = TypeVar("Group", bound="OptionGroup")
Owner = TypeVar("Owner")
Check = Callable[[str, Any], None]
"""Function of the name of an option and its value that raises an error for a wrong value."""

RESULT, SPEED = "result", "speed"
"""What an option changes that plain PyTorch does not have: the result, or only time and memory."""


def option(default: Any, help: str, check: Check | None = None, *, beyond_torch: str = "") -> Any:
    """Declare an option as a field of an `OptionGroup`.

    Args:
        default: its value in a script. `options.COMMAND_LINE_DEFAULTS` has what differs on the
            command line.
        help: its meaning, as the comment in YAML has it: null, true and false, not None, True and
            False.
        check: function that refuses wrong values.
        beyond_torch: `RESULT` or `SPEED`, if `lightning-3d verify` must turn it off to compare with
            plain PyTorch.
    """
    return field(
        default=default, metadata={"help": help, "check": check, "beyond_torch": beyond_torch}
    )


class OptionGroup:
    """Base of dataclasses whose fields are options. Each value is checked, then the values of a
    group together."""

    def __post_init__(self) -> None:
        for entry in options_of(type(self)):
            check = entry.metadata["check"]
            if check is not None:
                check(entry.name, getattr(self, entry.name))
        for kind in type(self).__mro__:
            if "check_together" in vars(kind):
                vars(kind)["check_together"](self)

    @classmethod
    def of(cls, values: object) -> Self:
        """Return the options of this group that an object with the same attributes has, such as the
        group `parallelism`."""
        return cls(**{entry.name: getattr(values, entry.name) for entry in options_of(cls)})


def options_of(kind: type) -> tuple[Field[Any], ...]:
    """Return the fields of a group that are options; the others are results of options."""
    return tuple(entry for entry in fields(kind) if "help" in entry.metadata)


def defaults_of(kind: type, *, beyond_torch: Iterable[str] = ()) -> dict[str, Any]:
    """Return the defaults of a group, or only of the options that plain PyTorch does not have."""
    wanted = tuple(beyond_torch)
    return {
        one.name: one.default
        for one in options_of(kind)
        if not wanted or one.metadata["beyond_torch"] in wanted
    }


# Checks


def one_of(*values: str, null: bool = False, error: type[Lightning3DError] = ConfigError) -> Check:
    """Return a check for one of some words.

    Args:
        null: whether null passes, too.
        error: class of the error.
    """

    def check(name: str, value: Any) -> None:
        if value in values or (null and value is None):
            return
        also = ", or null" if null else ""
        raise error(
            f"{name} must be {listed(values, last='or')}{also}; got"
            f' "{value}".{did_you_mean(str(value), values)}'
        )

    return check


def at_least(least: float, *, null: bool = False) -> Check:
    """Return a check for a finite number from `least` on; `null`: or null."""

    def check(name: str, value: Any) -> None:
        if value is not None or not null:
            check_number(name, value, least=least)

    return check


# Signatures and docstrings


def accept(
    kind: Callable[P, Group], *, first: Callable[[], None]
) -> Callable[[Callable[[Owner, Group], None]], Callable[Concatenate[Owner, P], None]]:
    """Decorate an `__init__` that takes a group of options: callers pass each option as an
    argument.

    Its signature, annotations and docstring are those of the group. An unknown argument is refused
    with the nearest known one.

    Args:
        kind: class of the group.
        first: function that is called before any option is checked.
    """
    group = kind
    assert isinstance(group, type)

    def decorate(init: Callable[[Owner, Group], None]) -> Callable[Concatenate[Owner, P], None]:
        def __init__(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> None:
            first()
            refuse_unknown(type(self).__name__, kwargs, [entry.name for entry in options_of(group)])
            init(self, kind(*args, **kwargs))

        hints = {
            name: hint
            for name, hint in get_type_hints(group).items()
            if name in inspect.signature(group).parameters
        }
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(group).parameters.values()
        flat = [own, *(one.replace(annotation=hints[one.name]) for one in parameters)]
        __init__.__signature__ = inspect.Signature(flat, return_annotation=None)  # type: ignore[attr-defined]
        __init__.__annotations__ = {**hints, "return": None}
        __init__.__qualname__ = init.__qualname__
        __init__.__module__ = init.__module__
        __init__.__doc__ = arguments(group)
        return __init__

    return decorate


def refuse_unknown(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse the name of an option that there is not, with the nearest one.

    Raises:
        ConfigError: with all names.
    """
    for name in given:
        if name not in known:
            raise ConfigError(
                f'{owner} has no argument "{name}".{did_you_mean(name, known)} It has'
                f" {listed(known)}."
            )


def arguments(kind: type) -> str:
    """Return the options of a group as the `Args:` of a docstring."""
    return "\n".join(["Take the options.", "", "Args:", *_entries(kind), ""])


def _entries(kind: type) -> Iterator[str]:
    for entry in options_of(kind):
        help = entry.metadata["help"]
        for yaml, python in {"null": "None", "true": "True", "false": "False"}.items():
            help = re.sub(rf"(?<!-)\b{yaml}\b", python, help)
        text = f"{entry.name}: {help}."
        yield fill(
            text, 100, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False
        )
