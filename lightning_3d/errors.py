"""Errors that a user can repair. Each message says what is wrong, with the numbers, and the nearest thing that works.

The command line prints the message alone, without a traceback, and ends with `exit_code`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches


class Lightning3DError(Exception):
    """Base of all errors that are the user's to repair. `exit_code` is what the process ends with."""

    exit_code = 2


class LayoutError(Lightning3DError):
    """A layout that does not exist, does not fit the launched ranks, or does not fit the model or the batch."""


class ConfigError(Lightning3DError):
    """An option that is unknown, out of range, or in conflict with another one."""


class PlanError(Lightning3DError):
    """A model that cannot be parallelized as it is: no plan, several plans, or one that does not match it."""


class DataError(Lightning3DError):
    """A data set or a batch that cannot be used."""


class CheckpointError(Lightning3DError):
    """A checkpoint that is missing, incomplete, damaged, or of another model."""


class NonFiniteError(Lightning3DError):
    """A loss, a gradient norm or a weight that is not finite during training. All ranks raise it at the same place."""

    exit_code = 1


def is_full(error: BaseException) -> bool:
    """Whether an error says that a disk, or what a user may take of it, is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean "x"?` for the known word nearest to `word`, whatever its case; empty when none is near."""
    by_lower = {name.lower(): name for name in known}
    begun = [name for name in by_lower if len(word) > 2 and name.startswith(word.lower())]
    near = begun or get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return f' Did you mean "{by_lower[near[0]]}"?' if near else ""


def listed(values: Iterable[object], *, last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    words = [str(value) for value in values]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


class StorageError(CheckpointError):
    """The disk did not take or give what it should: full, read-only, failing, gone."""


class StorageHangs(CheckpointError):
    """The disk does not answer: nothing can be said of what was written. No mistake of the user's."""

    exit_code = 1


def reason(error: BaseException) -> str:
    """An error in a sentence about something larger. The text of an `OSError` names the file, its repr does not."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
