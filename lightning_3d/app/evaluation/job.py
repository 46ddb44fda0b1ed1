"""The job around an evaluation: checks, ranks, exit code. torch is imported after all checks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from lightning_3d.app.config.compose import plain
from lightning_3d.app.config.plan_run import RunPlan, plan_run
from lightning_3d.app.evaluation.configuration import compose_evaluation
from lightning_3d.app.evaluation.subject import Subject
from lightning_3d.app.planner.advice import Advice
from lightning_3d.app.training.data.file_check import check_files
from lightning_3d.app.training.job import be_rank, start_ranks
from lightning_3d.errors import Lightning3DError
from lightning_3d.ranks.boards import connect_board
from lightning_3d.ranks.environment import OutsideRank, print_once, set_master_address
from lightning_3d.ranks.reporter import FailureReporter


@dataclass(frozen=True)
class Evaluation:
    """A checked evaluation.

    Attributes:
        subject: the model.
        plan: the checked run of its configuration.
        config: composed configuration.
    """

    subject: Subject
    plan: RunPlan
    config: DictConfig

    def describe(self) -> str:
        """Describe model and layout in one line."""
        plan = self.plan
        where = "GPUs" if plan.accelerator == "gpu" else "CPU"
        return f"{self.subject.path}: {plan.layout.name} on {where}, {plan.precision}"

    def about(self) -> dict[str, str]:
        """Return model, layout and precision, for a file of results."""
        return {
            "model": str(self.subject.path),
            "layout": self.plan.layout.name,
            "precision": self.plan.precision,
        }


def check(
    subject: Subject, overrides: Sequence[str], outside: OutsideRank | None, *, reads_data: bool
) -> Evaluation:
    """Check everything that can be checked before ranks are started.

    Args:
        reads_data: whether validation sets are read.

    Raises:
        Lightning3DError: as `lightning-3d train` raises it for the layout, the model and the data.
    """
    config = compose_evaluation(subject, overrides, reads_data=reads_data)
    with open_dict(config):
        config.run_folder = tempfile.gettempdir()  # of nothing; the ranks get a folder of their own
    plan = plan_run(config, outside, Advice(), trains=False)
    if reads_data and outside is None:
        check_files(config.data)
    return Evaluation(subject, plan, config)


def run(
    evaluation: Evaluation, job: Callable[..., None], request: Any, outside: OutsideRank | None
) -> int:
    """Run `job(config, checkpoint, request)` on every rank, and return the exit code.

    Args:
        job: function of a module, which calls `prepare_rank` first.
        request: what to do; pickled for ranks that are fresh interpreters.
    """
    plan = evaluation.plan
    for warning in plan.warnings:
        print_once(f"lightning_3d: {warning}", outside, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="lightning_3d_") as folder:
        with open_dict(evaluation.config):
            evaluation.config.run_folder = folder
        frozen = plan.freeze(plain(evaluation.config))
        arguments = (frozen, evaluation.subject.checkpoint, request)
        if outside is not None:
            set_master_address(outside)
            board = connect_board(
                outside.rank, outside.world_size, frozen["trainer"]["rendezvous_timeout"]
            )
            reporter = FailureReporter(board, outside.rank, outside.world_size)
            return be_rank(outside, lambda: job(*arguments), reporter, plan.layout.world_size)[0]
        outcome = start_ranks(job, arguments, plan, frozen, Path(folder) / "logs")
        if outcome.message is not None:
            print(outcome.message, file=sys.stderr, flush=True)
            _show_logs(Path(folder) / "logs", outcome.exit_code)
        return outcome.exit_code


def _show_logs(logs: Path, exit_code: int) -> None:
    """Keep the output of the ranks of an evaluation that failed, and print where it is."""
    if exit_code == Lightning3DError.exit_code or not logs.is_dir():
        return
    kept = Path(tempfile.mkdtemp(prefix="lightning_3d_logs_"))
    for file in logs.glob("rank_*.log"):
        file.rename(kept / file.name)
    print(f"lightning_3d: the output of the ranks is in {kept}", file=sys.stderr)
