"""`lightning-3d doctor`: check a machine or a cluster before the first run. torch is imported after
all checks of the command line."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_3d.app.cli.options import Command
from lightning_3d.errors import ConfigError, LayoutError, Lightning3DError, listed, plural
from lightning_3d.layout.layout import Layout, nearest_layouts
from lightning_3d.ranks.environment import OutsideRank, outside_rank, set_master_address
from lightning_3d.ranks.supervisor import can_fork, cores, launch

if TYPE_CHECKING:
    from lightning_3d.app.config.run_config import RunConfig
    from lightning_3d.app.doctor.check import Setup
    from lightning_3d.app.doctor.examination import Report

COMMAND = Command(
    "doctor",
    "Check a machine or a cluster before the first run: versions, GPUs, links, network, file"
    " system, limits and variables, the speed of each rank, and the collectives of a layout. Prints"
    " what is wrong, which rank it concerns, and what to do.\n\nStarts one rank for each GPU of"
    " this machine. To check several nodes, start it on all of them: torchrun --nnodes 2"
    " --nproc-per-node 8 ... -m lightning_3d doctor, or srun lightning-3d doctor\n\nExit code: 1 if"
    " something is wrong, 0 if not (warnings are not), 2 for a mistake on the command line.",
    examples=[
        "",
        "cluster=local_cpu --ranks 4 parallelism=tp2_dp2",
        "cluster=h100 parallelism=tp2_pp2_dp2 --json doctor.json",
    ],
)
COMMAND.count(
    "--ranks",
    "ranks on this machine; default: one for each GPU; without GPUs those of the layout, or 2",
)
COMMAND.option(
    "--folder",
    "FOLDER",
    "folder of runs, whose file system is checked; default: the current one",
    default=".",
)
COMMAND.option(
    "--json",
    "FILE.json",
    "file to write with all measurements; lightning-3d plan reads it as profile=FILE.json",
)
COMMAND.count(
    "--limit",
    "seconds for each check, after which a rank counts as silent; default: 60",
    default=60,
)

_GRACE_SECONDS = 2.0


class _Silent(Lightning3DError):
    """Ranks hang, so that this process has to end them. The report is written already."""

    exit_code = 1


def run(arguments: list[str], outside: OutsideRank | None) -> int:
    """Run the command and return the exit code.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None: the ranks are started
            here.
    """
    return COMMAND.run(
        arguments, lambda options, overrides: _run(options, overrides, outside), outside=outside
    )


def _run(options: Namespace, overrides: Sequence[str], outside: OutsideRank | None) -> int:
    target = Path(options.json).absolute() if options.json else None
    if target is not None and not target.parent.is_dir():
        raise ConfigError(
            f"--json must be a file in an existing folder; there is no folder {target.parent}."
        )
    setup, ranks = _setup(options, overrides, outside)
    if outside is not None:
        set_master_address(outside)
        return _outside(setup, outside, target)
    with tempfile.TemporaryDirectory(prefix="lightning_3d_doctor_") as work:
        return _start(setup, ranks, Path(work), target)


def _setup(
    options: Namespace, overrides: Sequence[str], outside: OutsideRank | None
) -> tuple[Setup, int]:
    """Decide what to examine: (setup, number of ranks)."""
    from lightning_3d.app.config.compose import compose
    from lightning_3d.app.config.machine import visible_gpus
    from lightning_3d.app.config.plan_run import check_keys
    from lightning_3d.app.doctor.check import Setup

    run = check_keys(compose([*overrides, "trainer.dry=true"]))
    given = any(word.split("=")[0].lstrip("+").startswith("parallelism") for word in overrides)
    layout = Layout.parse(run.parallelism.layout, order=run.parallelism.order) if given else None
    there = visible_gpus()
    local = (
        outside.local_world_size
        if outside is not None
        else options.ranks or there or (layout.world_size if layout else 2)
    )
    if run.cluster.accelerator == "cpu" and outside is None and not options.ranks:
        local = layout.world_size if layout else 2
    accelerator = _accelerator(run, there, local)
    ranks = outside.world_size if outside is not None else local
    layout = layout or Layout(dp=ranks)
    if layout.world_size != ranks:
        near = listed((other.name for other in nearest_layouts(layout, ranks)), last="or")
        started = (
            "were started"
            if outside is not None
            else "can be started here"
            if not options.ranks
            else "are asked for"
        )
        more = (
            ""
            if outside is not None or accelerator == "gpu"
            else f" Or use --ranks {layout.world_size}."
        )
        raise LayoutError(
            f"Layout {layout} has {plural(layout.world_size, 'rank')}, but {ranks} {started}."
            f" Layouts for {plural(ranks, 'rank')}: {near}.{more}"
        )
    return (
        Setup(
            layout,
            accelerator,
            run.cluster,
            str(Path(options.folder).absolute()),
            float(options.limit),
        ),
        ranks,
    )


def _accelerator(run: RunConfig, there: int, local: int) -> str:
    if run.cluster.accelerator == "gpu" and there < local:
        raise ConfigError(
            f"The cluster {run.cluster.name} has GPUs, so {plural(local, 'rank')} on this machine"
            f" need{'s' * (local == 1)} {plural(local, 'GPU')}, but it has {there}. Start at most"
            " one rank for each GPU, or check the CPU with cluster=local_cpu."
        )
    return "gpu" if run.cluster.accelerator != "cpu" and there >= local else "cpu"


def _start(setup: Setup, ranks: int, work: Path, target: Path | None) -> int:
    """Start the ranks on this machine, and print the report that rank 0 leaves."""
    threads = None
    if setup.accelerator == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        threads = max(1, cores() // ranks)
        # torch starts more threads when it is imported, and then no fork is safe
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        import torch.distributed  # noqa: F401  (imported once, before the ranks are forked)
    fork = setup.accelerator == "cpu" and can_fork()
    outcome = launch(
        _rank,
        (setup, str(work)),
        ranks,
        logs=work / "logs",
        fork=fork,
        threads=threads,
        grace=_GRACE_SECONDS,
    )
    text, data = work / "report.txt", work / "report.json"
    if not text.is_file():
        if outcome.message is not None:
            print(outcome.message, file=sys.stderr, flush=True)
        return outcome.exit_code or 1
    print(text.read_text("utf-8"), flush=True)
    content = json.loads(data.read_text("utf-8"))
    if target is not None:
        _write(target, content)
    return int(content["exit_code"])


def _outside(setup: Setup, me: OutsideRank, target: Path | None) -> int:
    """Examine as a rank of torchrun or SLURM. A check that hangs leaves its thread behind, so that
    the process ends without waiting."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def show(report: Report) -> None:
        from lightning_3d.app.doctor.record import as_data
        from lightning_3d.app.doctor.table import show as table

        print(table(report), flush=True)
        if target is not None:
            _write(target, as_data(report))

    try:
        code = _examine(setup, me, show)
    except Lightning3DError as error:
        print(f"lightning_3d: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank(setup: Setup, work: str) -> None:
    """Examine as a rank that this command started."""
    me = outside_rank()
    assert me is not None
    silent: list[int] = []

    def leave(report: Report) -> None:
        from lightning_3d.app.doctor.record import as_data
        from lightning_3d.app.doctor.table import show as table

        Path(work, "report.json").write_text(json.dumps(as_data(report)), "utf-8")
        draft = Path(work, "report.txt.part")
        draft.write_text(table(report), "utf-8")
        draft.replace(Path(work, "report.txt"))
        silent.extend([*report.silent, *report.hung])

    _examine(setup, me, leave)
    if silent:
        raise _Silent(f"Ranks {listed(silent)} do not answer.")


def _examine(setup: Setup, me: OutsideRank, show: Any) -> int:
    """Run all checks on this rank; rank 0 shows the report before the others end. Returns the exit
    code."""
    from lightning_3d.app.doctor.board import DoctorBoard
    from lightning_3d.app.doctor.checks import CHECKS
    from lightning_3d.app.doctor.examination import Report, dismiss, examine

    board = DoctorBoard(me.rank, setup.limit)
    found = examine(setup, CHECKS, me, board)
    if isinstance(found, Report):
        show(found)
        dismiss(board, found)
    _close_groups()
    return found.exit_code if isinstance(found, Report) else found


def _close_groups() -> None:
    """Close the process groups, which hang in a collective if a rank is silent."""
    import torch.distributed as dist

    from lightning_3d.app.doctor.time_limit import TimeLimit, within

    if dist.is_initialized():
        with suppress(TimeLimit, RuntimeError):
            within(_GRACE_SECONDS, dist.destroy_process_group)


def _write(path: Path, content: dict[str, Any]) -> None:
    draft = Path(f"{path}.part")
    draft.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    draft.replace(path)
