"""Last lines of a run that ended early: where it stopped, its newest checkpoint, and the command to
resume. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

from lightning_3d.app.config.override_words import hydra_value
from lightning_3d.app.runs.checkpoints import own_checkpoints
from lightning_3d.app.runs.metrics_file import column, read_rows
from lightning_3d.app.runs.status import RunStatus
from lightning_3d.errors import ConfigError

_PLACE_KEYS = ("hydra.run.dir", "trainer.resume", "trainer.auto_resume")


@dataclass(frozen=True)
class CommandLine:
    """The command line by which a run was started.

    Attributes:
        program: words before the arguments.
        overrides: overrides of `train`; None for `lightning-3d run`, which repeats a configuration
            file.
    """

    program: tuple[str, ...]
    overrides: tuple[str, ...] | None = None

    @classmethod
    def of_train(cls, overrides: Sequence[str]) -> CommandLine:
        """Return the command line of this process, as `train`."""
        script = Path(sys.argv[0])
        program = (
            ("python", sys.argv[0]) if script.name == "train.py" else (*_program(script), "train")
        )
        return cls(program, tuple(overrides))

    @classmethod
    def of_run(cls) -> CommandLine:
        """Return the command line of this process, as `run`."""
        return cls((*_program(Path(sys.argv[0])), "run"))

    def resume(self, folder: Path) -> str:
        """Return the command that resumes the newest checkpoint of the run in a folder, quoted for
        a shell."""
        if self.overrides is None:
            words = [str(folder / "config.yaml"), "--resume"]
        else:
            kept = [
                word
                for word in self.overrides
                if word.partition("=")[0].lstrip("+") not in _PLACE_KEYS
            ]
            words = [*kept, f"hydra.run.dir={hydra_value(str(folder))}", "trainer.auto_resume=true"]
        return shlex.join([*self.program, *words])


def _program(script: Path) -> tuple[str, ...]:
    return ("lightning-3d",) if script.name == "lightning-3d" else ("python", "-m", "lightning_3d")


def last_lines(
    folder: Path,
    config: Mapping[str, Any],
    status: RunStatus,
    command: CommandLine | None,
    launcher: str | None,
) -> list[str]:
    """Write the lines to print about a run that was interrupted or failed.

    Args:
        folder: run folder.
        config: configuration of the run.
        status: how it ended.
        command: how it was started; None if that is not known.
        launcher: torchrun or slurm, which must start the resumed run too; None: no launcher.
    """
    code = status.exit_code or 0
    how = f"was stopped by {Signals(code - 128).name}" if code > 128 else "failed"
    steps = column(read_rows(folder / "metrics.csv"), "step")
    where = (
        f"after step {round(steps[-1])} of {config['trainer']['max_steps']}"
        if steps
        else "before the first step ended"
    )
    lines = [f"lightning_3d: the run {how} {where}"]
    try:
        newest = next(iter(own_checkpoints(folder)), None)
    except ConfigError as error:
        return [*lines, f"  checkpoint: unknown. {error}"]
    if newest is None:
        return [*lines, "  checkpoint: none"]
    lines.append(f"  checkpoint: {newest.path} (step {newest.steps})")
    if command is not None:
        by = f" (start it with {launcher} as before)" if launcher is not None else ""
        lines.append(f"  resume{by}: {command.resume(folder)}")
    return lines
