"""What a command is doing, on stderr: a bar in a terminal; elsewhere a line at the start, and one
every ten seconds.

Library code names its tasks with `task`, which shows nothing unless a command has turned it on with
`shown`. LIGHTNING_3D_PROGRESS=0 turns it off. The ranks of a command inherit the setting; of these
only rank 0 shows its tasks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "LIGHTNING_3D_PROGRESS"
_SECONDS = 10.0
"""Time between two lines where stderr is not a terminal."""

Advance = Callable[[float], None]
"""Function that reports how much more of a task is done, in units of its total."""


@contextmanager
def shown() -> Iterator[None]:
    """Show tasks in this context, and in processes that are started there, unless the user has
    turned that off."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]


@contextmanager
def task(what: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Show that a task begins, and how much of it is done.

    Args:
        what: the task, such as "reading the checkpoint".
        total: number of units; None: not known.
        unit: name of the units, in the plural; "B" for bytes.

    Yields:
        A function to call with the number of units that were done since the last call.
    """
    if os.environ.get(VARIABLE) != "1" or int(os.environ.get("RANK", "0")) > 0:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(what, total, unit) as advance:
            yield advance
    else:
        yield _lines(what, total, unit)


@contextmanager
def _bar(what: str, total: float | None, unit: str) -> Iterator[Advance]:
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no thread: ranks may be forked while a bar is shown
    form: dict[str, Any] = {"bar_format": "{desc} ..."} if total is None and not unit else {}
    scale = {"unit": "B", "unit_scale": True} if unit == "B" else {"unit": f" {unit}"}
    with tqdm(
        total=total, desc=what, file=sys.stderr, leave=False, dynamic_ncols=True, **scale, **form
    ) as bar:

        def advance(done: float) -> None:
            bar.update(done)

        yield advance


def _lines(what: str, total: float | None, unit: str) -> Advance:
    print(f"{what} ...", file=sys.stderr, flush=True)
    started = said = time.monotonic()
    count = 0.0

    def advance(done: float) -> None:
        nonlocal said, count
        count += done
        now = time.monotonic()
        if now - said >= _SECONDS:
            said = now
            share = f"{count / total:.0%}" if total else f"{count:.0f} {unit}"
            rate = f" ({count / (now - started):.0f} {unit}/s)" if unit == "tokens" else ""
            print(f"{what}: {share} after {now - started:.0f} s{rate}", file=sys.stderr, flush=True)

    return advance
