"""`lightning-3d inspect`: show what a checkpoint holds. torch is imported after all checks."""

from __future__ import annotations

from argparse import Namespace

from lightning_3d.app.cli.find_checkpoint import CHECKPOINT, NO_VERIFY, find_checkpoint
from lightning_3d.app.cli.options import Command
from lightning_3d.ranks.progress import task

COMMAND = Command(
    "inspect",
    "Show what a checkpoint holds: its step, the layout that wrote it, its tensors and sizes, and"
    " whether it is complete and undamaged.",
    takes="",
    examples=["outputs/run", "outputs/run/checkpoints/step_100.ckpt --tensors"],
)
COMMAND.argument("CHECKPOINT", CHECKPOINT)
COMMAND.flag("--tensors", "list every tensor with its type and shape")
COMMAND.flag("--no-verify", NO_VERIFY)


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, lambda options, _: _inspect(options))


def _inspect(options: Namespace) -> int:
    path = find_checkpoint(options.checkpoint)

    with task("importing torch"):
        from lightning_3d.checkpoint.inspection import describe

    for line in describe(path, tensors=options.tensors, hashes=not options.no_verify):
        print(line, flush=True)
    return 0
