"""Engines that start the jobs of a sweep and wait for them: the interface, and the engine that uses
this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

from lightning_3d.app.runs.sweep.jobs import SweepJob
from lightning_3d.layout.sizes import check_sizes
from lightning_3d.ranks.failure import silent_end
from lightning_3d.ranks.process_ties import belong_to
from lightning_3d.ranks.supervisor import GRACE_SECONDS, SAVE_SECONDS, end_signals

_POLL_SECONDS = 0.5
_END_POLL_SECONDS = 0.1
# a run that is interrupted gives its ranks GRACE_SECONDS twice
_END_SECONDS = 2 * GRACE_SECONDS + 4.0
_CANNOT_START = 126


@dataclass(frozen=True)
class Began:
    """Event: a job was started or submitted. `where` gives the user details, such as the number of
    a SLURM job."""

    job: SweepJob
    where: str = ""


@dataclass(frozen=True)
class Going:
    """Event: a job is still running, so its progress can be shown."""

    job: SweepJob


@dataclass(frozen=True)
class Ended:
    """Event: a job has ended. `reason` explains the exit code if the engine knows more."""

    job: SweepJob
    exit_code: int
    reason: str | None = None


Event = Began | Going | Ended


class JobEngine(Protocol):
    """Interface of an engine, which starts jobs and reports what happens to them."""

    def run(self, jobs: Sequence[SweepJob]) -> Generator[Event, None, None]:
        """Run all jobs, in any order and as many at once as the engine chooses. Yields one `Began`
        and one `Ended` for each, and any number of `Going` between them. A job that fails does not
        stop the others.

        When the generator is closed, or an `Interrupted` reaches it, it stops what it started
        before it returns or raises.
        """


class Interrupted(BaseException):
    """Exception for a signal that ends the sweep.

    Attributes:
        number: number of the signal.
        repeated: whether another signal came after it: then jobs end without a save.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.repeated = False

    @property
    def exit_code(self) -> int:
        return 128 + self.number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` at the first SIGINT, SIGTERM or SIGHUP, wherever this process is. Later
    ones are noted in it.

    If something swallows it, or turns it into another error, it is raised at the end.
    """
    raised: list[Interrupted] = []

    def obey(number: int, frame: FrameType | None) -> None:
        if raised:
            raised[0].repeated = True
            return
        raised.append(Interrupted(number))
        raise raised[0]

    before = {number: signal.signal(number, obey) for number in end_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if raised and not isinstance(sys.exc_info()[1], Interrupted):
            raise raised[0]


class LocalEngine:
    """Fresh processes on this machine, which print into the folders of their jobs and never outlive
    this process (Linux).

    Args:
        at_once: number of jobs that run at the same time; None: all.

    Raises:
        ConfigError: `at_once` is not a whole number of at least 1.
    """

    def __init__(self, at_once: int | None = 1) -> None:
        check_sizes(**{"hydra.launcher.jobs_at_once": at_once})
        self._at_once = at_once

    def run(self, jobs: Sequence[SweepJob]) -> Generator[Event, None, None]:
        waiting = deque(jobs)
        running: dict[SweepJob, subprocess.Popen[bytes]] = {}  # jobs compare by identity
        try:
            while waiting or running:
                while waiting and (self._at_once is None or len(running) < self._at_once):
                    job = waiting.popleft()
                    yield Began(job)
                    try:
                        running[job] = _start(job)
                    except OSError as error:
                        yield Ended(
                            job, _CANNOT_START, f"cannot start {error.filename}: {error.strerror}."
                        )
                for job in list(running):
                    code = _wait(running[job], _POLL_SECONDS / len(running))
                    if code is None:
                        yield Going(job)
                    else:
                        del running[job]
                        yield Ended(
                            job,
                            code if code >= 0 else 128 - code,
                            silent_end(code) if code < 0 else None,
                        )
        except BaseException as error:
            _end(
                list(running.values()),
                error if isinstance(error, Interrupted) else Interrupted(signal.SIGTERM),
            )
            raise


def _start(job: SweepJob) -> subprocess.Popen[bytes]:
    """Start a job in its own process group, so that a Ctrl-C at the terminal reaches it only
    through the sweep."""
    parent = os.getpid()
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=job.work_folder,
            env={**os.environ, **job.environment},
            preexec_fn=lambda: belong_to(parent),
        )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    return None


def _end(processes: Sequence[subprocess.Popen[bytes]], error: Interrupted) -> None:
    """Forward a signal, and kill what does not end in time: runs save first, as runs outside of a
    sweep do, unless another signal comes. The ranks of a run die with the process that started
    them."""
    number = error.number
    if processes and number == signal.SIGINT:
        print(
            "lightning_3d: SIGINT: the running jobs finish their step and save. Press Ctrl-C again"
            " to stop at once.",
            file=sys.stderr,
        )
    for process in processes:
        _send(process, number)
    deadline = time.monotonic() + _END_SECONDS + SAVE_SECONDS
    hurries = False
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if error.repeated and not hurries:
            hurries = True
            deadline = time.monotonic() + _END_SECONDS
            for process in processes:
                _send(process, number)
        time.sleep(_END_POLL_SECONDS)
    for process in processes:
        if process.poll() is None:
            _send(process, signal.SIGKILL)
            process.wait()


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process alone, which passes it on to its ranks; send SIGKILL to its
    whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number) if number == signal.SIGKILL else process.send_signal(number)
