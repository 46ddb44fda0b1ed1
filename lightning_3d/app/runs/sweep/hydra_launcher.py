"""Base of the Hydra launchers of this package: turns overrides into jobs, and outcomes into results
for sweepers.

Hydra loads its plugins with every command, so what only a sweep needs is imported when it begins.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_3d.app.runs.check import CheckedMachine, check_for
from lightning_3d.errors import listed

if TYPE_CHECKING:
    from lightning_3d.app.config.plan_run import RunPlan
    from lightning_3d.app.runs.sweep.local_engine import JobEngine
    from lightning_3d.app.runs.sweep.results import JobOutcome


class SweepLauncher(Launcher):
    """Base of the launchers of this package, which differ in the engine.

    Args:
        metric: name of the number that a job returns to the sweeper, or several; None: the final
            validation loss, or the training loss if there is no validation.

    Attributes:
        machine: where the engine runs the jobs.
    """

    machine = CheckedMachine.THIS

    def __init__(self, metric: Any = None) -> None:
        self._single = isinstance(metric, str) or not isinstance(metric, Sequence)
        self._metrics = [metric] if self._single else list(metric)

    @abstractmethod
    def engine(self) -> JobEngine:
        """Make the engine that starts the jobs."""

    def check(self, config: DictConfig) -> RunPlan:
        """Check a job's configuration for the machine where the engine runs it. Raises
        Lightning3DError where it cannot run."""
        return check_for(config, self.machine)

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Take the sweep's folder, before Hydra writes into it."""
        from lightning_3d.app.runs.sweep.compose_job import swept_overrides
        from lightning_3d.app.runs.sweep.folder import SweepFolder
        from lightning_3d.app.runs.sweep.results import check_metric
        from lightning_3d.app.runs.sweep.sweep import Sweep

        given = any(line.startswith("hydra.sweep.dir=") for line in config.hydra.overrides.hydra)
        for name in self._metrics:
            if name is not None:
                check_metric(name)
        engine, keys = self.engine(), swept_overrides(hydra_context, config)
        folder = SweepFolder.take(Path(str(config.hydra.sweep.dir)), numbered=not given)
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder.path)
        self._sweep = Sweep(folder, engine, keys=keys)
        # train.py's job knows its sweep, for the exit code; the function of another app runs as its
        # own script.
        self._ours = hasattr(task_function, "begin_sweep")
        if self._ours:
            task_function.begin_sweep(self._sweep)  # type: ignore[attr-defined]
        self._context, self._config, self._task = hydra_context, config, task_function

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run a batch of jobs; all are composed and checked before the first one starts."""
        from lightning_3d.app.runs.sweep.compose_job import compose_job
        from lightning_3d.app.runs.sweep.local_engine import Interrupted, interruptible

        run = self.check if self._ours else (sys.executable, str(Path(sys.argv[0]).absolute()))
        folder = self._sweep.folder.path
        try:
            with interruptible():
                composed = [
                    compose_job(self._context, self._config, overrides, number, folder, run)
                    for number, overrides in enumerate(job_overrides, initial_job_idx)
                ]
                outcomes = self._sweep.run([entry for entry, _ in composed])
        except Interrupted as end:
            self._sweep.close()
            sys.exit(end.exit_code)
        if not self._ours:  # train.py shows the table when the sweeper has no more batches
            self._sweep.show_table()
        return [
            self._returned(outcome, config)
            for outcome, (_, config) in zip(outcomes, composed, strict=True)
        ]

    def _returned(self, outcome: JobOutcome, config: DictConfig | None) -> JobReturn:
        """Return the result of a job for the sweeper."""
        from lightning_3d.app.runs.status import FINISHED
        from lightning_3d.app.runs.sweep.compose_job import JobFailed, task_config
        from lightning_3d.app.runs.sweep.results import CHECKED

        returned = JobReturn(
            overrides=list(outcome.overrides), working_dir=str(outcome.folder or "")
        )
        returned.task_name = self._config.hydra.job.name
        if config is not None:
            returned.cfg, returned.hydra_cfg = (
                task_config(config),
                OmegaConf.masked_copy(config, ["hydra"]),
            )
        values = [outcome.objective(metric) for metric in self._metrics]
        compares = not str(self._config.hydra.sweeper._target_).endswith(".BasicSweeper")
        useless = (
            compares
            and outcome.status == FINISHED
            and not all(value is not None and math.isfinite(value) for value in values)
        )
        if outcome.status in (FINISHED, CHECKED) and not useless:
            returned.status = JobStatus.COMPLETED
            returned.return_value = values[0] if self._single else values
            self._sweep.has_results = True
        elif self._ours and not compares:
            # reading a failure would end the sweep; the exit code shows it
            returned.status = JobStatus.COMPLETED
            returned.return_value = None
        else:
            why = (
                f"its result is {listed([str(value) for value in values])}"
                if useless
                else outcome.reason
            )
            # sweepers raise an error for a result that they cannot compare
            returned.status = JobStatus.FAILED
            returned.return_value = JobFailed(f"job {outcome.number} {outcome.status}: {why}")
        if config is not None:
            self._context.callbacks.on_job_end(config=config, job_return=returned)
        return returned
