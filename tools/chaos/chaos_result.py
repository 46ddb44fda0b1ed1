"""The results of a run with faults: what each fault cost, and whether losses and weights are those
without faults."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from chaos_plan import KINDS, Fault

_ROUNDING = 1e-4


@dataclass(frozen=True)
class Steps:
    """When steps ended, in the order in which they were computed, repeated ones too.

    Attributes:
        ends: (time, step).
    """

    ends: list[tuple[float, int]]

    @classmethod
    def read(cls, path: Path) -> Steps:
        lines = path.read_text().splitlines() if path.exists() else []
        return cls([(float(when), int(step)) for when, step in (line.split() for line in lines)])

    @property
    def last(self) -> int:
        return self.ends[-1][1] if self.ends else 0

    def durations(self) -> dict[int, float]:
        """Seconds of each step that counts, from the end of the one before; those that began an
        attempt have none."""
        return {
            step: when - before
            for (before, earlier), (when, step) in zip(self.ends, self.ends[1:], strict=False)
            if step == earlier + 1
        }

    @property
    def usual(self) -> float:
        """The median duration of a step."""
        return median(self.durations().values())

    def lost_to(self, fault: Fault) -> float | None:
        """Seconds from the fault until its last step was done, without the time of the new steps
        among them; None if it never was."""
        if fault.begin is None:
            return None
        first: dict[int, float] = {}
        for when, step in self.ends:
            first.setdefault(step, when)
        recovered = max((when for when, step in self.ends if step == fault.over), default=None)
        if recovered is None:
            return None
        new = sum(when > fault.begin and step <= fault.over for step, when in first.items())
        return max(0.0, recovered - fault.begin - new * self.usual)

    def lasting(self, faults: Sequence[Fault]) -> float:
        """Seconds that went into steps of the result: their durations, without what saves and
        faults added to them."""
        disturbed = {step for one in faults for step in range(one.step, one.over + 1)}
        usual, durations = self.usual, self.durations()
        steps = {step for _, step in self.ends}
        save = self.save_seconds()
        whole = sum(
            durations[step] if step in durations and step not in disturbed else usual
            for step in steps
        )
        return whole - save * sum(
            step % SAVE_EVERY == 0 for step in steps if step in durations and step not in disturbed
        )

    def save_seconds(self) -> float:
        """Seconds for which one save holds the run up: what steps with a save take longer, in the
        median."""
        durations = self.durations()
        saves = [seconds for step, seconds in durations.items() if step % SAVE_EVERY == 0]
        others = [seconds for step, seconds in durations.items() if step % SAVE_EVERY]
        return max(0.0, median(saves) - median(others)) if saves and others else 0.0


SAVE_EVERY = 5
"""Steps between checkpoints."""


def differences(calm: Path, chaos: Path, same_layout: bool) -> list[str]:
    """Say what differs between a run with faults and one without: to the last bit, or beyond
    rounding where the layout changed."""
    columns = []
    for run in (calm, chaos):
        with (run / "metrics.csv").open() as file:
            columns.append(
                [(row["step"], row["loss"], row["grad_norm"]) for row in csv.DictReader(file)]
            )
    if [row[0] for row in columns[0]] != [row[0] for row in columns[1]]:
        return [f"the runs have {len(columns[0])} and {len(columns[1])} steps"]
    different = [
        int(one[0])
        for one, other in zip(*columns, strict=True)
        if (
            one != other
            if same_layout
            else abs(float(one[1]) - float(other[1])) > _ROUNDING * float(one[1])
        )
    ]
    problems = [f"the losses differ from step {different[0]}"] if different else []
    hashes = [_hashes(run) for run in (calm, chaos)]
    if same_layout and (hashes[0] != hashes[1] or not hashes[0]):
        problems.append("the final weights differ")
    return problems


def litter(calm: Path, chaos: Path) -> list[str]:
    """Hidden files and drafts in the folder of a run with faults that one without does not have."""

    def hidden(run: Path) -> set[str]:
        names = (path.relative_to(run) for path in run.rglob("*"))
        return {
            re.sub(r"\d+", "N", str(name))
            for name in names
            if any(part.startswith(".") for part in name.parts)
        }

    return sorted(hidden(chaos) - hidden(calm))


def _hashes(run: Path) -> dict[str, str]:
    """Hashes of the tensors in the newest checkpoint."""
    newest = max(
        (run / "checkpoints").glob("step_*.ckpt"),
        key=lambda path: int(re.findall(r"\d+", path.name)[-1]),
    )
    manifest = json.loads((newest / "manifest.json").read_text())
    return {
        name: json.dumps(entry)
        for name, entry in manifest["files"].items()
        if name.endswith((".safetensors", ".distcp"))
    }


def show(faults: Sequence[Fault], width: int = 110) -> None:
    """Print the table."""
    print(
        f"{'fault':<15} {'step':>5} {'rank':>4} {'found after':>11} {'lost':>7}  injected how | the"
        " message that named it"
    )
    for one in faults:
        words = one.words if len(one.words) <= width else one.words[:width] + " ..."
        said = f"{KINDS[one.kind].how} | {words or 'NOT NAMED'}"
        print(
            f"{one.kind:<15} {one.step:>5} {one.rank:>4} {_seconds(one.seconds):>11}"
            f" {_seconds(one.lost):>7}  {said}"
        )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def write_csv(faults: Sequence[Fault], path: Path) -> None:
    """Keep the table in a file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            [
                "fault",
                "injected how",
                "step",
                "rank",
                "found after seconds",
                "seconds lost",
                "message",
            ]
        )
        for one in faults:
            writer.writerow(
                [
                    one.kind,
                    KINDS[one.kind].how,
                    one.step,
                    one.rank,
                    one.seconds,
                    one.lost,
                    one.words,
                ]
            )


def load() -> str:
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f}"
