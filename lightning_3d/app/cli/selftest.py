"""`lightning-3d selftest`: compare every technique on this machine's GPUs or CPU ranks with one
rank."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from lightning_3d.app.cli.options import Command
from lightning_3d.app.config.machine import visible_gpus
from lightning_3d.app.verification.cells import Cell, all_cells, chosen
from lightning_3d.errors import ConfigError, plural

COMMAND = Command(
    "selftest",
    "Check on this machine that every technique computes what one rank computes: tensor, sequence,"
    " pipeline, data, context and expert parallelism, ZeRO, recomputation, offload, torch.compile,"
    " float8, checkpoints. Tiny models train on the GPUs at hand, or on CPU ranks, in fp32 and"
    " bf16, and a plain loop on one rank trains them again. The exit code is 1 if a cell is wrong,"
    " fails or hangs.\n\nIt tests the GPUs of one node; torchrun and srun do not apply. On several"
    " nodes, run it on each node.",
    takes="[cluster=local_cpu]",
    examples=["", "--only tp,pp --ranks 4 cluster=local_cpu", "--list"],
)
COMMAND.word("cluster=local_cpu", "use CPU ranks although there are GPUs")
COMMAND.count(
    "--ranks",
    "ranks on this machine; default: one for each GPU, 4 on a machine without GPUs. More ranks than"
    " GPUs share them",
)
COMMAND.count(
    "--minutes", "time limit; cells that it does not reach are named; default: 5", default=5
)
COMMAND.option(
    "--only",
    "GROUPS",
    "groups of cells, with commas between them, such as tp,pp; --list shows them",
)
COMMAND.option(
    "--output",
    "FILE.json",
    "file to attach to an issue; default: lightning_3d_selftest.json",
    default="lightning_3d_selftest.json",
)
COMMAND.flag("--list", "list the cells without starting ranks")


def run(arguments: list[str]) -> int:
    """Run the command and return the exit code."""
    return COMMAND.run(arguments, _run)


def _run(options: Namespace, words: Sequence[str]) -> int:
    gpus, ranks = _place(options.ranks, words)
    cells = chosen(all_cells(ranks), options.only)
    if options.list:
        print("\n".join(map(_listed, cells)))
        return 0
    path = Path(options.output).absolute()
    if not path.parent.is_dir():
        raise ConfigError(
            f"--output must be a file in an existing folder; there is no folder {path.parent}."
        )
    from lightning_3d.app.verification import session, verdicts
    from lightning_3d.app.verification.workers import CallFailed, CallHung

    try:
        finished = session.run(cells, ranks, gpus, 60.0 * options.minutes)
    except (CallFailed, CallHung) as error:
        print(f"lightning_3d: the ranks did not start: {error}", file=sys.stderr, flush=True)
        return 1
    verdicts.write(finished, path)
    print(verdicts.table(finished))
    print(f"Wrote {path}.")
    return int(verdicts.is_wrong(finished))


def _place(ranks: int | None, words: Sequence[str]) -> tuple[int, int]:
    """Decide where to run: (number of GPUs, 0 for CPU ranks; number of ranks)."""
    for word in words:
        if word not in ("cluster=local_cpu", "cluster=auto"):
            raise ConfigError(
                f'lightning-3d selftest takes cluster=local_cpu (or cluster=auto); got "{word}".'
            )
    gpus = 0 if "cluster=local_cpu" in words else visible_gpus()
    ranks = ranks or gpus or 4
    return min(gpus, ranks), ranks


def _listed(cell: Cell) -> str:
    return (
        f"{cell.group:<11} {cell.technique:<31} {cell.shown_layout:<12} {cell.precision:<5}"
        f" {plural(cell.ranks, 'rank')}"
    )
