"""Runs a user's script in a layout and on one process with plain Lightning, and says what
differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.errors import ConfigError, Lightning3DError, plural, spans
from lightning_3d.ranks.process_ties import die_with
from lightning_3d.ranks.progress import task
from lightning_3d.ranks.role import ALONE, ALONE_WHOLE, NUDGED, ONE, RANKS, Role

if TYPE_CHECKING:
    from lightning_3d.app.verification.differences import Comparison

_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_LAUNCHER_PREFIXES = ("SLURM_", "TORCHELASTIC_")
_TAIL_LINES = 25
_GRACE_SECONDS = 1.0


@dataclass
class ScriptFailed(Exception):
    """A run of the script ended without its records.

    Attributes:
        code: exit code of the run.
        message: what it printed at the end.
    """

    role: Role
    code: int
    message: str

    @property
    def last_line(self) -> str:
        """The line that says most: the refusal, or the last one."""
        lines = self.message.strip().splitlines() or [""]
        refusals = [
            line.removeprefix("lightning_3d: ")
            for line in lines
            if line.startswith("lightning_3d: ")
        ]
        return refusals[-1] if refusals else lines[-1]


def verify_script(words: Sequence[str], steps: int) -> int:
    """Verify a script, print what was found, and return the exit code: 0 for "same", 1 for a
    difference, 2 for a refusal.

    Args:
        words: the script and its arguments, or "-m", a module and its arguments.
        steps: optimizer steps to compare.

    Raises:
        ConfigError: there is no such script.
    """
    _require_script(words)
    with tempfile.TemporaryDirectory(
        prefix="lightning_3d_verify_", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        try:
            return _verify(words, steps, folder)
        except ScriptFailed as failed:
            return _explain_failure(failed)
        except KeyboardInterrupt:
            print("lightning_3d: interrupted, nothing was compared", file=sys.stderr)
            raise


def _require_script(words: Sequence[str]) -> None:
    if words[0] == "-m":
        if len(words) < 2:
            raise ConfigError(
                "verify -m needs the name of a module, for example lightning-3d verify -m"
                " project.train."
            )
        return
    if not Path(words[0]).is_file():
        raise ConfigError(f'There is no script "{words[0]}".')


def _verify(words: Sequence[str], steps: int, folder: Path) -> int:
    roles = {name: Role(name, folder, steps) for name in (RANKS, ONE, NUDGED, ALONE, ALONE_WHOLE)}
    _run(words, [roles[RANKS]])
    facts = roles[ONE].facts()
    _introduce(facts)
    _run(words, [roles[ONE], roles[NUDGED]])
    from lightning_3d.app.verification.differences import compare
    from lightning_3d.strategy.recorded.records import Records

    [one], [nudged] = Records.load(roles[ONE].own), Records.load(roles[NUDGED].own)

    def compared(role: Role) -> Comparison:
        return compare(Records.load(role.own), one, nudged, facts)

    def compared_further(role: Role) -> Comparison | None:
        """Compare a further run, which may be refused."""
        try:
            _run(words, [role])
        except ScriptFailed as failed:
            print(f"not compared: {role.meaning} ({failed.last_line})")
            return None
        return compared(role)

    comparison = compared(roles[RANKS])
    _print_data(comparison)
    if comparison.same:
        print(comparison)
        print(
            f"same: {facts['layout']} computes what plain Lightning computes on one process"
            f" ({plural(len(one.losses), 'step')})"
        )
        return 0
    alone = compared_further(roles[ALONE]) if comparison.found and facts["ranks"] > 1 else None
    apart = comparison.found and facts["micro_batches"] * facts["dp"] > 1
    alone_whole = (
        compared_further(roles[ALONE_WHOLE]) if apart and (alone is None or alone.found) else None
    )
    _print_difference(comparison, alone, alone_whole, facts)
    return 1


def _introduce(facts: Mapping[str, Any]) -> None:
    rows = f"{facts['rows']} rows" if facts["rows"] else "a batch"
    each = (
        f"{facts['micro_batches']} micro-batch{'es' * (facts['micro_batches'] != 1)} of"
        f" {plural(facts['micro_batch_rows'] or 0, 'row')}"
    )
    readers = "each rank" if facts["dp"] == 1 else f"each of {facts['dp']} data-parallel ranks"
    print(f"{facts['layout']}: {readers} reads {rows} per step, in {each}")
    for note in facts["notes"]:
        print(f"both runs: {note}")
    print("both runs: without dropout and noise inside the model", flush=True)


def _print_data(comparison: Comparison) -> None:
    """Say where one process would have read other rows than the ranks; the comparison continues
    with those of the ranks."""
    if comparison.other_rows and comparison.misread is None:
        word = "step" if len(comparison.other_rows) == 1 else "steps"
        print(
            f"data: one process would read other values in {word} {spans(comparison.other_rows)}."
            " The samples draw random numbers, or the script divides the data itself. Both runs"
            " use the rows that the ranks read."
        )


def _print_difference(
    comparison: Comparison,
    alone: Comparison | None,
    alone_whole: Comparison | None,
    facts: Mapping[str, Any],
) -> None:
    from lightning_3d.app.verification.advice import (
        READING,
        describe,
        first_line,
        further_lines,
        kind_of,
    )
    from lightning_3d.app.verification.differences import LOGGED

    if all(found.what == LOGGED for found in comparison.found) and comparison.misread is None:
        print(
            f"DIFFERENT: {facts['layout']} trains as plain Lightning does on one process, but logs"
            " other values"
        )
    else:
        print(
            f"DIFFERENT: {facts['layout']} does not compute what plain Lightning computes on one"
            " process"
        )
    if comparison.misread is not None:
        print(f"first difference: data: {comparison.misread}")
    else:
        print(f"first difference: {first_line(comparison.found[0], facts['layout'])}")
    for line in further_lines(alone, alone_whole, facts):
        print(line)
    kind = READING if comparison.misread is not None else kind_of(comparison, alone, alone_whole)
    print(f"looks like: {kind}. {describe(kind)}")
    _print_steps(comparison)


def _print_steps(comparison: Comparison) -> None:
    """Print the loss and the gradient norm of every step, of the layout and of one process."""
    print("  step        loss: layout  one process  gradient norm: layout  one process")
    for step, loss in enumerate(comparison.losses):
        norm = comparison.norms[step]
        print(
            f"  {step + 1:<6} {loss[0]:>16.8g} {loss[1]:>12.8g} {norm[0]:>22.8g} {norm[1]:>12.8g}"
        )


def _run(words: Sequence[str], roles: Sequence[Role]) -> None:
    """Run the script in some roles at the same time."""
    processes = []
    with task(f"running the script: {' and '.join(role.meaning for role in roles)}"):
        try:
            processes = [_start(words, role) for role in roles]
            for role, process in zip(roles, processes, strict=True):
                _finish(role, process)
        finally:
            for process in processes:
                _end(process)


def _start(words: Sequence[str], role: Role) -> subprocess.Popen[bytes]:
    role.own.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if not _is_launchers(name)}
    environment |= role.environment() | {"WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "lightning_3d.app.verification.start", *words]
    with (role.own / "output.txt").open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )


def _is_launchers(name: str) -> bool:
    return name in _LAUNCHERS or name.startswith(_LAUNCHER_PREFIXES)


def _finish(role: Role, process: subprocess.Popen[Any]) -> None:
    code = process.wait()
    if code or not list(role.own.glob("rank_*.pt")):
        raise ScriptFailed(role, code, (role.own / "output.txt").read_text(errors="replace"))


def _end(process: subprocess.Popen[Any]) -> None:
    """End a run and everything that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _explain_failure(failed: ScriptFailed) -> int:
    """Print why there is nothing to compare, and return the exit code."""
    lines = failed.message.strip().splitlines()
    refusals = [line for line in lines if line.startswith("lightning_3d: ")]
    if failed.code == Lightning3DError.exit_code and refusals:
        first = lines.index(refusals[0])
        print("\n".join(lines[first:]), file=sys.stderr)
        print("refused, not compared", file=sys.stderr)
    elif failed.code:
        print("\n".join(_without_own_frames(lines)[-_TAIL_LINES:]), file=sys.stderr)
        how = f"failed with exit code {failed.code} in the run of {failed.role.meaning}"
        print(f"lightning_3d: the script {how}, so nothing was compared", file=sys.stderr)
    else:
        print(
            "lightning_3d: the script ended without a step of Trainer.fit in the run of"
            f" {failed.role.meaning}, so nothing was compared. It needs a"
            ' Trainer(strategy=Lightning3DStrategy("tp2_pp2_dp2"), devices=8) that fits.',
            file=sys.stderr,
        )
    return Lightning3DError.exit_code


def _without_own_frames(lines: Sequence[str]) -> list[str]:
    """Leave out of tracebacks the frames by which a run starts the user's script."""
    kept: list[str] = []
    leaves_out = False
    for line in lines:
        if line.lstrip().startswith('File "'):
            leaves_out = "<frozen runpy>" in line or "app/verification/start.py" in line
        elif not line.startswith("    "):
            leaves_out = False
        if not leaves_out:
            kept.append(line)
    return kept
