"""A gate that keeps forks out while threads call libraries. Imports no torch.

A forked process has one thread, and a copy of every lock. A lock that another thread held at that
moment (of a backend of fsspec, of the import of a module, of the resolver of names) stays locked in
the copy, so the process would wait for ever where it needs the lock. The libraries have many such
locks, which are not known here. So a fork waits until no thread is in a library, and threads wait
until the fork is over.
"""

from __future__ import annotations

# Imported for their hooks, which hold locks from before a fork on. Hooks registered last run first:
# the gate waits before they do.
import concurrent.futures.thread  # noqa: F401
import logging  # noqa: F401
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LONGEST_SECONDS = 5.0
"""Time that a fork waits at most. Libraries hold locks for moments: a thread that is inside for
longer waits for a response, which may never come."""


class ForkGate:
    """Lets threads in or forks out, never both. A thread may enter again while it is inside, and
    may fork there.

    Attributes:
        longest: seconds that a fork waits at most.
    """

    def __init__(self, longest: float = _LONGEST_SECONDS) -> None:
        self.longest = longest
        self._changed = threading.Condition()
        self._inside: dict[int, int] = {}  # how often each thread has entered
        self._forking: set[int] = set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep forks of other threads out. Waits while one is under way."""
        own = threading.get_ident()
        with self._changed:
            if own not in self._inside:
                # its own fork: a handler of a signal came in between
                self._changed.wait_for(lambda: not self._forking - {own})
            self._inside[own] = self._inside.get(own, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[own] -= 1
                if not self._inside[own]:
                    del self._inside[own]
                    self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait until no other thread is inside, and hold the lock of the gate until the fork is
        over."""
        own = threading.get_ident()
        self._changed.acquire()
        self._forking.add(own)
        self._changed.wait_for(lambda: not self._inside.keys() - {own}, self.longest)

    def after_fork_in_parent(self) -> None:
        self._forking.discard(threading.get_ident())
        self._changed.notify_all()
        self._changed.release()

    def after_fork_in_child(self) -> None:
        """Forget the threads of the parent, with a new lock: the copy of the old one may be in any
        state."""
        own = threading.get_ident()
        self._changed, self._forking = threading.Condition(), set()
        self._inside = {own: self._inside[own]} if own in self._inside else {}


FORKS = ForkGate()
"""The gate of this process: all its forks wait at it."""

os.register_at_fork(
    before=FORKS.before_fork,
    after_in_parent=FORKS.after_fork_in_parent,
    after_in_child=FORKS.after_fork_in_child,
)
