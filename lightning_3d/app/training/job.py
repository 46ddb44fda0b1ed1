"""A run with its complete configuration: its folder, its ranks, its exit code. Independent of
Hydra.

`lightning-3d train` calls this after Hydra has composed the configuration, `lightning-3d run` with
one that was composed before. torch is imported only after the configuration and the folder have
been checked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.app.config.machine import gpu_names, hide_gpus
from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.planner.advice import need_less
from lightning_3d.app.runs.checkpoints import refuse_others
from lightning_3d.app.runs.ending import CommandLine, last_lines
from lightning_3d.app.runs.folder import LOGS, RunFolder, restart_from
from lightning_3d.app.runs.frozen_config import frozen_text
from lightning_3d.app.runs.logger_packages import require_loggers
from lightning_3d.app.runs.restarts import read_restarts
from lightning_3d.app.runs.resumed_keys import changes_since
from lightning_3d.app.runs.status import RunStatus
from lightning_3d.compat.imports import light_imports
from lightning_3d.errors import ConfigError, Lightning3DError
from lightning_3d.ranks.boards import LocalBoard, StoreBoard, connect_board
from lightning_3d.ranks.environment import (
    OutsideRank,
    leave_out_spare,
    print_once,
    set_master_address,
)
from lightning_3d.ranks.memory_kills import MEMORY_RAN_OUT
from lightning_3d.ranks.output import survive_output
from lightning_3d.ranks.progress import shown, task
from lightning_3d.ranks.reporter import FailureReporter
from lightning_3d.ranks.spare import release_spare, wait_for_end
from lightning_3d.ranks.supervisor import Outcome, can_fork, cores, launch


@dataclass(frozen=True)
class JobPlace:
    """The place of a run, the same on all ranks.

    Attributes:
        path: path of the run folder.
        resume: checkpoint of an earlier attempt to resume; None if there is none.
        folder: the run folder, on rank 0 and before ranks are started; else None.
        reporter: reporter of this rank's failures, if the rank is already connected.
    """

    path: Path
    resume: str | None
    folder: RunFolder | None
    reporter: FailureReporter | None = None


def find_place(
    outside: OutsideRank | None, plan: RunPlan, take: Callable[[Path | None], RunFolder]
) -> JobPlace:
    """Take the run folder on rank 0 and broadcast it; the clocks of other ranks would give it
    another name.

    Rank 0 also checks that the loggers can be used, because it alone logs, and that checkpoints of
    other runs stay as they are.

    Args:
        outside: this process as a rank that torchrun or SLURM started; None if the ranks are
            started here.
        plan: checked configuration of the run.
        take: takes a folder, given the folder of the previous attempt if torchrun has restarted the
            ranks.

    Raises:
        ConfigError: on every rank. RendezvousError: ranks have not joined in time.
    """
    run = plan.run

    def take_checked(earlier: Path | None) -> RunFolder:
        require_loggers(run.logger)
        folder = take(earlier)
        try:
            refuse_others(folder.path, run.callbacks, folder.resume or run.trainer.resume)
        except ConfigError:
            folder.discard()
            raise
        return folder

    if outside is None:
        folder = take_checked(None)
        return JobPlace(folder.path, folder.resume, folder)
    set_master_address(outside)
    board = connect_board(outside.rank, outside.world_size, run.trainer.rendezvous_timeout)
    reporter = FailureReporter(board, outside.rank, outside.world_size)
    taken = None
    found: dict[str, str | None] = {}
    if outside.rank == 0:
        before = (
            json.loads(board.earlier_broadcast("run_folder") or "{}")
            if isinstance(board, StoreBoard)
            else {}
        )
        try:
            taken = take_checked(Path(before["folder"]) if "folder" in before else None)
            found = {"folder": str(taken.path), "resume": taken.resume}
        except ConfigError as error:
            found = {"refused": str(error)}
    if isinstance(board, StoreBoard):
        found = json.loads(board.broadcast("run_folder", json.dumps(found), outside.rank))
    if "refused" in found:
        raise ConfigError(str(found["refused"]))
    return JobPlace(Path(str(found["folder"])), found["resume"], taken, reporter)


def run_job(
    config: dict[str, Any],
    plan: RunPlan,
    outside: OutsideRank | None,
    place: JobPlace,
    command: CommandLine | None = None,
) -> int:
    """Train, and return the exit code.

    Args:
        config: complete configuration, without interpolations, already checked.
        plan: result of `plan_run` for it.
        outside: this process as a rank that torchrun or SLURM started; None if the ranks are
            started here.
        place: place of the run, from `find_place`.
        command: how the run was started, for the message on how to resume it.
    """
    survive_output()
    frozen, folder = plan.freeze(config), place.folder
    for warning in plan.warnings:
        print_once(f"lightning_3d: {warning}", outside, file=sys.stderr)
    if folder is not None:  # written before `resume` is set: the file repeats the whole run
        folder.write_config(frozen_text(frozen))
    if place.resume is not None:
        frozen["trainer"] = {**frozen["trainer"], "resume": place.resume}
    if folder is None:
        assert outside is not None
        return be_rank(outside, lambda: run_rank(frozen), place.reporter, plan.layout.world_size)[0]
    print_once(f"{plan.describe()}\nrun folder: {folder.path}", outside)
    if place.resume is not None:
        restarts = read_restarts(folder.path)
        why = (
            f", because the attempt before failed: {restarts[-1].reason}"
            if restarts and restarts[-1].reason
            else ""
        )
        print_once(f"resuming from {place.resume}{why}", outside)
    if frozen["trainer"]["resume"] is not None and (
        changed := changes_since(frozen["trainer"]["resume"], frozen)
    ):
        print_once(f"changed since the checkpoint was saved: {changed}", outside)
    status = RunStatus.begun(next(iter(gpu_names()), "") if plan.accelerator == "gpu" else "")
    status.write(folder.path)
    code, reason = 1, ""
    try:
        if outside is None:
            code, reason = _start_until_done(plan, frozen, folder, status)
        else:
            FailureReporter.record = lambda code, reason: _settled(
                folder, status.after(code, reason)
            )
            code, reason = be_rank(
                outside, lambda: run_rank(frozen), place.reporter, plan.layout.world_size
            )
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        FailureReporter.record = None
        status = status.after(code, reason)
        if _settled(folder, status):
            _end(folder.path, frozen, status, command, outside)
            if MEMORY_RAN_OUT in reason:
                advice = need_less(
                    plan.run, plan.precision, plan.layout, plan.schedule, plan.micro_batch_size
                )
                if advice is not None:
                    print_once(f"lightning_3d: {advice}", outside, file=sys.stderr)
    return code


def _settled(folder: RunFolder, status: RunStatus) -> bool:
    """Write the status of a run that has ended. A refused one leaves its folder as it was instead;
    then False is returned."""
    if status.exit_code == Lightning3DError.exit_code and not folder.holds_results():
        folder.discard()
        return False
    try:
        status.write(folder.path)
    except OSError as error:
        print(
            f"lightning_3d: cannot write the status of this run: {error}",
            file=sys.stderr,
            flush=True,
        )
    return True


def _end(
    folder: Path,
    config: Mapping[str, Any],
    status: RunStatus,
    command: CommandLine | None,
    outside: OutsideRank | None,
) -> None:
    """Write the report of a run that has ended, and print how to resume one that ended early."""
    if (folder / "metrics.csv").is_file():
        _report(folder)
    if status.exit_code not in (0, Lightning3DError.exit_code):
        launcher = outside.launcher if outside is not None else None
        print(
            "\n".join(last_lines(folder, config, status, command, launcher)),
            file=sys.stderr,
            flush=True,
        )


def _report(folder: Path) -> None:
    """Write the report of a run that has ended. Its failure does not change the exit code."""
    from lightning_3d.app.runs.report.run import write_report

    try:
        print(f"report: {write_report(folder)}", flush=True)
    except Exception as error:
        print(
            f"lightning_3d: cannot write the report of this run: {error}",
            file=sys.stderr,
            flush=True,
        )


def _start_until_done(
    plan: RunPlan, frozen: dict[str, Any], folder: RunFolder, status: RunStatus
) -> tuple[int, str]:
    """Start the ranks, and start them again when one fails, `trainer.restarts` times. Returns what
    the last attempt returned.

    This process has imported everything already, so forked ranks train again within seconds. A
    signal or a wrong option ends the run.
    """
    options = frozen["trainer"]
    code, reason = _start_ranks(plan, frozen, folder)
    for number in range(1, options.get("restarts", 0) + 1):
        if code in (0, Lightning3DError.exit_code) or code > 128:
            break
        try:
            status.after(code, reason).write(folder.path)
            newest = restart_from(folder.path, options)
            status.write(folder.path)
        except (OSError, ConfigError) as error:
            print(f"lightning_3d: {error}", file=sys.stderr, flush=True)
            break
        options = {**options, "resume": newest or options["resume"]}
        where = f"from {options['resume']}" if options["resume"] else "from the beginning"
        print(
            f"lightning_3d: starting the ranks again {where} (restart {number} of"
            f" {options['restarts']})",
            file=sys.stderr,
            flush=True,
        )
        code, reason = _start_ranks(plan, {**frozen, "trainer": options}, folder)
    return code, reason


def _start_ranks(plan: RunPlan, frozen: dict[str, Any], folder: RunFolder) -> tuple[int, str]:
    """Start the ranks on this machine and wait for them. Returns the exit code and the message of a
    failure."""
    outcome = start_ranks(run_rank, (frozen,), plan, frozen, folder.path / LOGS)
    if outcome.message is not None:
        print(outcome.message, file=sys.stderr, flush=True)
        if outcome.exit_code != Lightning3DError.exit_code:
            print(
                f"lightning_3d: the output of the ranks is in {folder.path / LOGS}", file=sys.stderr
            )
    return outcome.exit_code, outcome.message or ""


def start_ranks(
    job: Callable[..., None],
    arguments: tuple[Any, ...],
    plan: RunPlan,
    frozen: dict[str, Any],
    logs: Path,
) -> Outcome:
    """Run `job(*arguments)` in the ranks of a checked configuration on this machine, and wait for
    them.

    Args:
        job: function of a module, which calls `prepare_rank` first.
        frozen: the complete configuration.
        logs: folder for the output of ranks other than 0.
    """
    count = plan.layout.world_size
    threads = None
    if plan.accelerator == "cpu":
        # Before torch is imported, here or in the ranks: it reads these variables once.
        hide_gpus()
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        threads = int(os.environ["OMP_NUM_THREADS"])
    fork = _may_fork(frozen["trainer"]["start_method"], plan.accelerator)
    if fork:
        with shown(), task("importing torch and Transformers"):
            _import_all(frozen)
        fork = can_fork()
    return launch(job, arguments, count, logs=logs, fork=fork, threads=threads)


def be_rank(
    outside: OutsideRank, job: Callable[[], None], reporter: FailureReporter | None, used: int
) -> tuple[int, str]:
    """Run as a rank that torchrun or SLURM started; those from `used` on have no work. Returns the
    exit code and a failure's message."""
    reporter = reporter or FailureReporter(LocalBoard(), outside.rank, outside.world_size)
    reporter.watch()
    spare = outside.world_size - used
    if spare:
        leave_out_spare(outside, used)
    code = reporter.run(job) if outside.rank < used else wait_for_end(reporter.board, outside.rank)
    if spare and outside.rank == 0:
        release_spare(reporter.board, code, spare)
    reporter.close()
    return code, reporter.reason if code <= 128 else ""


def run_rank(frozen: dict[str, Any]) -> None:
    """Train, as one of the ranks."""
    prepare_rank(frozen)
    from lightning_3d.app.training.run import train

    train(frozen)


def prepare_rank(frozen: dict[str, Any]) -> None:
    """Hide GPUs that are not used, and import everything."""
    if frozen["cluster"]["accelerator"] == "cpu":
        hide_gpus()
    # a forked rank has everything already; a rank of torchrun or SLURM has nothing
    _import_all(frozen)


def _import_all(frozen: dict[str, Any]) -> None:
    """Import everything that a rank needs at once, where it costs less CPU time (see
    `light_imports`)."""
    with light_imports():
        from lightning_3d.app.training.run import preload

        preload(frozen)


def _may_fork(start_method: str, accelerator: str) -> bool:
    if start_method == "auto":
        return accelerator == "cpu" and sys.platform == "linux"
    return start_method == "fork"
