"""The kinds of faults, and which of them happen at which step on which rank, by a seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FIRST, APART = 8, 11
"""The first step with a fault, and the least distance after a fault is over: a fault that the next
one hides cannot be named."""

ABSENT_STEPS = 8
"""Steps of an elastic run without the node that was lost."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        how: how it is injected.
        message: pattern of the message that names it; {rank} is its rank.
        lasts: steps after its own for which it lasts.
        nodes: whether it needs two nodes (True), one (False), or works on both (None).
    """

    how: str
    message: str
    lasts: int = 0
    nodes: bool | None = None


_KILLED = r"rank {rank} of \d+ failed:\nit was killed by SIGKILL"
_STOPPED = r"the run was stopped by SIGTERM"

KINDS = {
    "kill": Kind("SIGKILL to a rank", _KILLED, nodes=False),
    "stop": Kind(
        "SIGSTOP to a rank", r"rank {rank} does not answer: process \d+ on \S+ is stopped"
    ),
    "hang": Kind(
        "training_step sleeps for an hour", r"rank \d+ has waited for rank {rank} .*in spoiled_step"
    ),
    "raise": Kind(
        "a callback raises ArithmeticError",
        r"rank {rank} of \d+ failed:\n(.*\n)*?ArithmeticError: a fault of the chaos run",
    ),
    "terminate": Kind("SIGTERM to the supervisor", _STOPPED, lasts=1, nodes=False),
    "kill supervisor": Kind(
        "SIGKILL to the supervisor",
        r"the attempt before failed: it ended without recording why",
        nodes=False,
    ),
    "nan": Kind(
        "an activation is multiplied by NaN",
        r"the loss is nan .*Computed again from the same numbers, the step is finite",
    ),
    "flip": Kind(
        "one bit of a weight is flipped",
        r"rank {rank} \(\S+, cpu\).*(holds other|hold different) weights",
    ),
    "slow": Kind(
        "training_step sleeps for 0.2 s", r"Slow: .*rank {rank} \(\S+, cpu\) takes", lasts=25
    ),
    "kill in a save": Kind("SIGKILL to a rank 20 ms after a save starts", _KILLED, nodes=False),
    "full disk": Kind(
        "a file fills the disk of the run",
        r"Checkpoint \S+ could not be written; training continues without it: .*No space left on"
        r" device",
        lasts=8,
    ),
    "cut": Kind(
        "the network of a node is cut",
        r"The node node1 with \d+ ranks? \(\S+\) is lost",
        nodes=True,
    ),
}


@dataclass
class Fault:
    """A fault of a run, and what became of it.

    Attributes:
        kind: its kind.
        step: optimizer step before which it happens, from 1.
        rank: rank on which it happens.
        begin: time at which the run was disturbed for it; for a cut network that is the move to two
            nodes.
        time: time at which it happened.
        words: the line of the message that named it.
        seconds: time from the fault to that message.
        lost: seconds that did not go into lasting progress because of it.
    """

    kind: str
    step: int
    rank: int
    begin: float | None = None
    time: float | None = None
    words: str = ""
    seconds: float | None = None
    lost: float | None = None

    @property
    def over(self) -> int:
        """The last step that it disturbs."""
        return self.step + KINDS[self.kind].lasts

    def happened(self, note: Path) -> bool:
        """Read the note of the rank on which it happens. Returns whether it has happened."""
        if self.time is None and note.exists():
            self.time = float(note.read_text())
            self.begin = self.begin or self.time
        return self.time is not None

    def hear(self, lines: Sequence[tuple[float, str]]) -> None:
        """Find the message that names this fault in lines that were printed after it, with their
        times."""
        if self.time is None or self.words:
            return
        after = [(when, line) for when, line in lines if when >= self.time - 0.1]
        text = "\n".join(line for _, line in after)
        found = re.search(KINDS[self.kind].message.format(rank=self.rank), text)
        if found is not None:
            self.words = next(line for line in found[0].splitlines()[::-1] if line.strip()).strip()
            self.seconds = max(0.0, after[text.count("\n", 0, found.end())][0] - self.time)


def choose(seed: int, count: int, steps: int, ranks: int, kinds: Sequence[str]) -> list[Fault]:
    """Choose faults at different steps, in order; each kind once before one comes again. Not in the
    first steps, nor in the last.

    Raises:
        SystemExit: there are too few steps.
    """
    numbers = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += numbers.sample(list(kinds), len(kinds))
    needs = [APART + KINDS[kind].lasts for kind in order[:count]]
    spare = steps - FIRST - APART - sum(needs)
    if spare < 0:
        raise SystemExit(
            f"These {count} faults need at least {steps - spare} steps; got --steps {steps}."
        )
    faults, place = [], FIRST
    for number, (kind, need) in enumerate(zip(order, needs, strict=False)):
        room = spare * (number + 1) // count - spare * number // count
        faults.append(Fault(kind, place + numbers.randrange(room + 1), numbers.randrange(1, ranks)))
        place += need + room
    return faults


def write_plan(faults: Sequence[Fault], path: Path) -> None:
    """Write the plan for the callback in the ranks."""
    given = [
        {"kind": one.kind, "step": one.step, "rank": one.rank, "lasts": KINDS[one.kind].lasts}
        for one in faults
    ]
    path.write_text(json.dumps(given))


def false_alarms(
    faults: Sequence[Fault], lines: Sequence[tuple[float, str]], ended: Sequence[float] = ()
) -> list[str]:
    """Messages that name a fault, or a rank, other than that which had happened last.

    Args:
        ended: times at which a run was told to end, so that the node that was cut off can come
            back; each accounts for one message.
    """
    text = "\n".join(line for _, line in lines)
    wrong, ends = [], list(ended)
    for pattern in sorted({kind.message for kind in KINDS.values()}):
        for found in re.finditer(pattern.format(rank=r"\d+"), text):
            when = lines[text.count("\n", 0, found.end())][0]
            if pattern == _STOPPED and any(
                one.begin is not None and one.begin <= when <= (one.time or when) for one in faults
            ):
                continue  # the move to two nodes
            if pattern == _STOPPED and ends and ends[0] <= when:
                del ends[0]
                continue
            before = [one for one in faults if one.time is not None and one.time <= when + 0.1]
            last = max(before, key=lambda one: one.time or 0.0, default=None)
            if (
                last is None
                or re.search(KINDS[last.kind].message.format(rank=last.rank), found[0]) is None
            ):
                wrong.append(
                    f"after {f'{last.kind} on rank {last.rank}' if last else 'no fault'}:"
                    f" {found[0].splitlines()[-1][:300]}"
                )
    return wrong
