"""Errors whose message is enough. It says what is wrong, with the numbers, and the nearest value
that works.

The command line prints only the message, without a traceback, and exits with `exit_code`: 2 for a
mistake that the user can fix, 1 for a failure while running.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches


class Lightning3DError(Exception):
    """Base class of all errors whose message is enough.

    Attributes:
        exit_code: exit code of the process.
    """

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())


_CONTROLS = {
    *range(0x20),
    0x7F,
    *range(0x80, 0xA0),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
} - {ord("\n"), ord("\t")}
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}


def printable(text: str) -> str:
    """Return a text in which characters that a terminal obeys instead of showing them are escaped:
    names in messages may have any."""
    return text.translate(_ESCAPED)


class LayoutError(Lightning3DError):
    """A layout that does not exist, does not fit the launched ranks, or does not fit the model or
    the batch."""


class ConfigError(Lightning3DError):
    """An option that is unknown, out of range, or in conflict with another one."""


class PlanError(Lightning3DError):
    """A model that cannot be parallelized as it is: no plan, several plans, or one that does not
    match it."""


class NoPlanError(PlanError):
    """A model without a parallel plan, or without the part of it that the layout needs."""


class DataError(Lightning3DError):
    """A data set or a batch that cannot be used."""


class FirstStepError(Lightning3DError):
    """User code that failed before the first step of a fit has ended, in a layout that may be the
    reason. `__cause__` is its error."""


class UnreachableData(DataError):
    """Remote data that could be read before and cannot be read any more, or no longer kept on the
    disk of this node."""

    exit_code = 1


class CheckpointError(Lightning3DError):
    """A checkpoint that is missing, incomplete, damaged, or belongs to another model."""


class RendezvousError(Lightning3DError):
    """Ranks that have not joined the run in time. The ranks that have raise it."""

    exit_code = 1


class NonFiniteError(Lightning3DError):
    """A loss, gradient norm or weight that became infinite or NaN during training. All ranks raise
    it at the same place."""

    exit_code = 1


class OutOfMemory(Lightning3DError):
    """The memory of a GPU or of the machine ran out on one rank."""

    exit_code = 1


class CallOrderError(Lightning3DError):
    """The methods of an `Engine` were called in an order that makes no optimizer step."""


class ReplicaError(Lightning3DError):
    """Ranks that should hold the same weights or optimizer state do not. All ranks raise it at the
    same place."""

    exit_code = 1


class ArithmeticFault(Lightning3DError):
    """A rank computes the same step differently each time. All ranks raise it at the same place."""

    exit_code = 1


def is_full(error: BaseException) -> bool:
    """Check whether an error says that a disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean "x"?` for the known word nearest to `word`, ignoring case; empty when
    none is near."""
    by_lower = {name.lower(): name for name in known}
    begun = [name for name in by_lower if len(word) > 2 and name.startswith(word.lower())]
    near = begun or get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f' Did you mean "{by_lower[near[0]]}"?' if near else ""


def listed(values: Iterable[object], *, last: str = "and") -> str:
    """Join values as `a`, `a and b` or `a, b and c`."""
    words = [str(value) for value in values]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def install(extra: str) -> str:
    """Return how to install the packages of an extra, as the end of a message: everywhere the same
    line."""
    return f'Install it with pip install "lightning-3d[{extra}]"'


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 node`, `2 nodes`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def spans(numbers: Iterable[int]) -> str:
    """Shorten numbers: `0-3, 5`."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


class StorageError(CheckpointError):
    """The disk cannot be read or written: full, read-only, failing or unmounted."""


class StorageHangs(CheckpointError):
    """The disk does not respond, so it is unknown what was written. Not a user error."""

    exit_code = 1


def reason(error: BaseException) -> str:
    """Describe an error within a longer sentence. The text of an `OSError` names the file, its repr
    does not."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
