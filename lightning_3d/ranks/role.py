"""The role of this process in a verification, which its environment says. Imports no torch."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigError

VARIABLE = "LIGHTNING_3D_VERIFY"
"""1: verify this script. Otherwise the name of a role, in the processes that a verification
starts."""
_FOLDER, _STEPS = f"{VARIABLE}_FOLDER", f"{VARIABLE}_STEPS"

RANKS, ONE, NUDGED = "ranks", "one", "nudged"
ALONE, ALONE_WHOLE = "alone", "alone_whole"
_MEANINGS = {
    RANKS: "the layout",
    ONE: "plain Lightning on one process",
    NUDGED: "plain Lightning from weights that differ in their last bit",
    ALONE: "one rank of this strategy",
    ALONE_WHOLE: "one rank of this strategy, without micro-batches",
}
_LAUNCHED = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
FACTS = "facts.json"


@dataclass(frozen=True)
class Role:
    """What this process does in a verification.

    Attributes:
        name: of the role.
        folder: folder of the verification. Each role has a folder in it.
        steps: optimizer steps to compare.
    """

    name: str
    folder: Path
    steps: int

    @classmethod
    def current(cls, environment: Mapping[str, str] = os.environ) -> Role | None:
        """The role of this process; None outside a verification."""
        name = environment.get(VARIABLE, "")
        return (
            cls(name, Path(environment[_FOLDER]), int(environment[_STEPS]))
            if name in _MEANINGS
            else None
        )

    def environment(self) -> dict[str, str]:
        """Variables that give a process this role."""
        return {VARIABLE: self.name, _FOLDER: str(self.folder), _STEPS: str(self.steps)}

    def enter(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Give this process the role."""
        environment.update(self.environment())

    @property
    def meaning(self) -> str:
        return _MEANINGS[self.name]

    @property
    def own(self) -> Path:
        """Folder of the records of this role."""
        return self.folder / self.name

    @property
    def is_plain(self) -> bool:
        """Whether plain Lightning trains on one process."""
        return self.name in (ONE, NUDGED)

    def facts(self) -> dict[str, Any]:
        """What the layout's run has recorded about itself."""
        found: dict[str, Any] = json.loads((self.folder / RANKS / FACTS).read_text())
        return found


def expect_hand_over() -> None:
    """Say at the end of a script that asks for its verification, and made no strategy, that nothing
    was verified: exit code 2."""
    if os.environ.get(VARIABLE) == "1":
        atexit.register(_end_unverified)


def _end_unverified() -> None:
    if (
        getattr(sys, "last_value", None) is not None
        or not Path(sys.argv[0]).name.endswith(".py")
        or "lightning_3d.__main__" in sys.modules
    ):
        return
    print(
        f"lightning_3d: nothing was verified: with {VARIABLE}=1, this script made no"
        ' Lightning3DStrategy. It needs a Trainer(strategy=Lightning3DStrategy("tp2_pp2_dp2"),'
        " devices=8) that fits.",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ConfigError.exit_code)


def hand_over() -> None:
    """Replace this process by `lightning-3d verify` of its own script, if the user asks for that in
    the environment.

    Raises:
        ConfigError: a launcher started this process, or it runs no script.
    """
    if os.environ.get(VARIABLE) != "1":
        return
    if any(name in os.environ for name in _LAUNCHED):
        raise ConfigError(
            f"{VARIABLE}=1 verifies a script that is started with python, not by a launcher: run"
            f" {VARIABLE}=1 python mine.py. For train.py, run lightning-3d verify KEY=VALUE."
        )
    words = script_words(sys.orig_argv, sys.argv)
    named = 2 if words[0] == "-m" else 1
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(
        sys.executable,
        [sys.executable, "-m", "lightning_3d", "verify", *words[:named], "--", *words[named:]],
        environment,
    )


def script_words(original: list[str], arguments: list[str]) -> list[str]:
    """Find the words that name the running script, and its arguments, in the command line of this
    process.

    Args:
        original: `sys.orig_argv`.
        arguments: `sys.argv`.

    Raises:
        ConfigError: the process runs no script.
    """
    count = len(original) - len(arguments) + 1
    head, rest = original[1:count], original[count:]
    if head[-2:-1] == ["-m"]:
        return [*head[-2:], *rest]
    if head and head[-1].endswith(".py"):
        return [head[-1], *rest]
    raise ConfigError(
        f"{VARIABLE}=1 needs a script, because each run starts it from its beginning. Write the"
        f" code to a file, and run {VARIABLE}=1 python mine.py."
    )
