"""The command line: `lightning-3d train`, and `python train.py`, which is the same; `run`, `plan`, `profile`, `dryrun`, `verify`,
`launch`, `export`, `import`, `inspect`, `report`.

Exit codes: 0, 2 for what the user can repair, 1 for a failure while running, 128 + n after signal n.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from lightning_3d.errors import Lightning3DError, did_you_mean
from lightning_3d.ranks.environment import OutsideRank, outside_rank
from lightning_3d.version import __version__

USAGE = """\
lightning-3d: tensor x pipeline x data x context x expert parallel training, driven by Hydra configs

Usage: lightning-3d COMMAND [ARGUMENTS]

  train       train a model; `lightning-3d train --help` explains the configuration
  run         train from the config.yaml of a run folder; `lightning-3d run --help`
  plan        find the fastest layouts on a cluster, without GPUs; `lightning-3d plan --help`
  profile     measure operations on this machine, for `plan`; `lightning-3d profile --help`
  dryrun      what ranks of a job would hold, send and compute, without its hardware; `lightning-3d dryrun --help`
  verify      whether a layout computes what one process computes; `lightning-3d verify --help`
  launch      hand a run to torchrun, SLURM or Kubernetes; `lightning-3d launch --help`
  export      write a checkpoint's model in the format of Transformers; `lightning-3d export --help`
  import      convert a checkpoint of Lightning (DDP, FSDP) or DeepSpeed; `lightning-3d import --help`
  inspect     show what a checkpoint holds, and whether it is whole; `lightning-3d inspect --help`
  report      make the page that shows a run or a sweep; `lightning-3d report --help`
  --version   print the version
  --help      print this

eval "$(lightning-3d -sc install=bash)" makes a shell complete what follows `train`; so it does for zsh and fish.
"""

_REFUSED = Lightning3DError.exit_code
_PATIENCE_SECONDS = 3.0


def entry_point() -> None:
    """The console script."""
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
    if command in _WITHOUT_RANKS:
        return _WITHOUT_RANKS[command](rest)
    if command in _COMMANDS:
        return _start(_COMMANDS[command], rest)
    print(f'lightning-3d: there is no command "{command}".{did_you_mean(command, [*_COMMANDS, *_WITHOUT_RANKS])}', file=sys.stderr)
    return _REFUSED


def _train(arguments: list[str], outside: OutsideRank | None) -> int:
    """Compose, check and run, or do one of Hydra's other services (`--help`, `--cfg job`, ...)."""
    from lightning_3d.cli.train import run

    return run(arguments, outside)


def _run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Check and run a configuration that was composed before."""
    from lightning_3d.cli.run import run

    return run(arguments, outside)


def _profile(arguments: list[str], outside: OutsideRank | None) -> int:
    """Measure operations on this machine."""
    from lightning_3d.cli.profile import run

    return run(arguments, outside)


def _launch(arguments: list[str]) -> int:
    """Hand a run to the nodes of its cluster."""
    from lightning_3d.cli.launch import run

    return run(arguments)


def _dryrun(arguments: list[str]) -> int:
    """Run ranks of a job without values."""
    from lightning_3d.cli.dryrun import run

    return run(arguments)


def _verify(arguments: list[str]) -> int:
    """Compare a layout with one process, in small."""
    from lightning_3d.cli.verify import run

    return run(arguments)


def _export(arguments: list[str]) -> int:
    """Write a checkpoint's model in another format."""
    from lightning_3d.cli.checkpoints import export

    return export(arguments)


def _import(arguments: list[str]) -> int:
    """Convert the checkpoint of another program."""
    from lightning_3d.cli.checkpoints import convert

    return convert(arguments)


def _inspect(arguments: list[str]) -> int:
    """Show what a checkpoint holds."""
    from lightning_3d.cli.checkpoints import inspect

    return inspect(arguments)


def _report(arguments: list[str]) -> int:
    """Make the page that shows a run or a sweep."""
    from lightning_3d.cli.report import run

    return run(arguments)


def _plan(arguments: list[str]) -> int:
    """Predict memory and time of layouts."""
    from lightning_3d.cli.plan import run

    return run(arguments)


_COMMANDS = {"train": _train, "run": _run, "profile": _profile}
_WITHOUT_RANKS = {
    "plan": _plan,
    "dryrun": _dryrun,
    "verify": _verify,
    "launch": _launch,
    "export": _export,
    "import": _import,
    "inspect": _inspect,
    "report": _report,
}


def _start(command: Callable[[list[str], OutsideRank | None], int], arguments: list[str]) -> int:
    """Run a command in this process, which may be a rank already."""
    try:
        outside = outside_rank()
    except Lightning3DError as error:
        print(f"lightning_3d: {error}", file=sys.stderr)
        return error.exit_code
    if outside is None:
        return command(arguments, None)
    return _as_outside_rank(command, arguments, outside)


def complete(arguments: list[str]) -> int:
    """Hydra's shell completion, which knows of no commands: it is shown a line without the word `train`."""
    if arguments and arguments[0].startswith("query="):
        application, _, line = os.environ.get("COMP_LINE", "").lstrip().partition(" ")
        command, space, line = line.lstrip().partition(" ")
        if not space:
            print(*(name for name in (*_COMMANDS, *_WITHOUT_RANKS) if name.startswith(command)))
            return 0
        if command != "train":
            return 0
        os.environ["COMP_LINE"] = f"{application} {line}"
    return _train(["-sc", *arguments], None)


def _as_outside_rank(
    command: Callable[[list[str], OutsideRank | None], int], arguments: list[str], outside: OutsideRank
) -> int:
    """Every rank refuses for itself, before any is connected, and rank 0 prints why.

    Launchers send SIGTERM to all ranks when one has ended. So that they do not end rank 0 before it has printed, it
    ignores the signal until its checks are over, and the others wait a little with a refusal.
    """
    if outside.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = command(arguments, outside)
    if code == _REFUSED and outside.rank > 0:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(_REFUSED))
        time.sleep(_PATIENCE_SECONDS)
    return code
