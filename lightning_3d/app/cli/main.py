"""The command `lightning-3d`: finds the module of a command and runs it. `python train.py` is the
same as `lightning-3d train`.

Exit codes: 0 for success; 2 for what the user can repair; 1 for a failure while running; 128 + n
after signal n.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from lightning_3d.app.cli.options import table
from lightning_3d.compat.imports import import_numpy
from lightning_3d.errors import Lightning3DError, did_you_mean
from lightning_3d.ranks.environment import OutsideRank, outside_rank
from lightning_3d.storage.user_cache import home
from lightning_3d.version import __version__


@dataclass(frozen=True)
class _Entry:
    """A command: the module with its `run`, its meaning, and whether torchrun or SLURM may start it
    as a rank."""

    module: str
    meaning: str
    in_ranks: bool = False

    def load(self) -> Callable[..., int]:
        """Import the module: no command imports what only another one needs."""
        if self.in_ranks:
            import_numpy()
        run: Callable[..., int] = import_module(f"lightning_3d.app.cli.{self.module}").run
        return run


PURPOSES = {
    "Train": {
        "train": _Entry(
            "train", "train a model; its --help explains the configuration", in_ranks=True
        ),
        "run": _Entry("run", "train from the config.yaml of a run folder", in_ranks=True),
        "launch": _Entry(
            "launch", "start a run with torchrun, SLURM, Kubernetes, SkyPilot or dstack"
        ),
    },
    "Check a cluster": {
        "doctor": _Entry(
            "doctor", "check the GPUs, links and settings of a machine or a cluster", in_ranks=True
        ),
        "selftest": _Entry(
            "selftest",
            "check on this machine's GPUs that every technique computes what one rank computes",
        ),
    },
    "Choose a layout": {
        "plan": _Entry("plan", "find the fastest layouts on a cluster, without its GPUs"),
        "profile": _Entry("profile", "measure operations on this machine, for plan", in_ranks=True),
        "dryrun": _Entry(
            "dryrun", "show what ranks of a job hold, send and compute, without its hardware"
        ),
    },
    "Bring your own model": {
        "draft-plan": _Entry("draft_plan", "draft the parallel plan of a model of your own"),
        "verify": _Entry("verify", "check that a layout computes what one process computes"),
    },
    "Prepare data": {
        "tokenize": _Entry("tokenize", "tokenize text into shards for data=tokens"),
    },
    "Use checkpoints and results": {
        "evaluate": _Entry(
            "evaluate",
            "compute losses of a model on validation sets, or run benchmarks, in any layout",
            in_ranks=True,
        ),
        "generate": _Entry(
            "generate", "print the text that a model writes after a prompt", in_ranks=True
        ),
        "import": _Entry("import_", "convert a checkpoint of Lightning (DDP, FSDP) or DeepSpeed"),
        "export": _Entry("export", "write the model of a checkpoint in the format of Transformers"),
        "inspect": _Entry("inspect", "show what a checkpoint holds, and whether it is complete"),
        "report": _Entry("report", "write the HTML report of a run or a sweep"),
    },
}
"""The commands, by what a user wants to do."""

COMMANDS = {name: entry for entries in PURPOSES.values() for name, entry in entries.items()}


def _purposes() -> str:
    return "\n\n".join(
        f"{purpose}:\n{table([(name, entry.meaning) for name, entry in entries.items()])}"
        for purpose, entries in PURPOSES.items()
    )


USAGE = f"""\
Usage: lightning-3d COMMAND [ARGUMENTS]

Tensor x pipeline x data x context x expert parallel training, driven by Hydra configs.

{_purposes()}

Options:
{table([("--version", "print the version"), ("-h, --help", "show this help; lightning-3d COMMAND --help explains a command")])}

Shell completion for train: eval "$(lightning-3d -sc install=bash)" in bash or zsh
"""  # noqa: E501

_REFUSED = Lightning3DError.exit_code
_PATIENCE_SECONDS = 3.0


def entry_point() -> None:
    """Run the console script."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run a command and return the exit code."""
    command, *rest = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command in ("-sc", "--shell-completion"):
        return complete(rest)
    entry = COMMANDS.get(command)
    if entry is None:
        print(
            f'lightning_3d: there is no command "{command}".{did_you_mean(command, COMMANDS)} See'
            " lightning-3d --help.",
            file=sys.stderr,
        )
        return _REFUSED
    home()  # libraries fail without one
    return _start(entry.load(), rest) if entry.in_ranks else entry.load()(rest)


def _start(command: Callable[..., int], arguments: list[str]) -> int:
    """Run a command in this process, which torchrun or SLURM may have started as a rank."""
    try:
        outside = outside_rank()
    except Lightning3DError as error:
        print(f"lightning_3d: {error}", file=sys.stderr)
        return error.exit_code
    if outside is None:
        return command(arguments, None)
    return _as_outside_rank(command, arguments, outside)


def complete(arguments: list[str]) -> int:
    """Complete a command line with Hydra's shell completion. Hydra does not know commands, so it
    gets the line without the word `train`."""
    if arguments and arguments[0].startswith("query="):
        application, _, line = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
        command, space, line = line.lstrip().partition(" ")
        if not space:
            print(*(name for name in COMMANDS if name.startswith(command)))
            return 0
        if command != "train":
            return 0
        os.environ["COMP_LINE"] = f"{application} {line}"
    return COMMANDS["train"].load()(["-sc", *arguments], None)


def _as_outside_rank(
    command: Callable[..., int], arguments: list[str], outside: OutsideRank
) -> int:
    """Run a command in a rank that a launcher started. Every rank checks for itself before any is
    connected; rank 0 prints the message.

    Launchers send SIGTERM to all ranks when one has ended. So that rank 0 is not ended before it
    has printed, it ignores the signal until its checks are over, and the other ranks wait a little
    before they end with a refusal.
    """
    if outside.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = command(arguments, outside)
    if code == _REFUSED and outside.rank > 0:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(_REFUSED))
        time.sleep(_PATIENCE_SECONDS)
    return code
