"""`hydra/launcher=slurm`: each job of `-m` is a SLURM job on as many nodes as its cluster has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_3d.app.config.keys import explain_value
from lightning_3d.app.runs.check import CheckedMachine
from lightning_3d.app.runs.sweep.hydra_launcher import SweepLauncher
from lightning_3d.errors import ConfigError

if TYPE_CHECKING:
    from lightning_3d.app.runs.sweep.local_engine import JobEngine


class Lightning3DSlurmLauncher(SweepLauncher):
    """Launcher that runs jobs on a SLURM cluster whose nodes see the files of this machine.

    Args:
        metric: see `SweepLauncher`.
        jobs_at_once: most jobs that are queued or running at the same time; None: all.
        poll_seconds: seconds between checks of the queue.
        resources: see `SlurmResources`.
    """

    machine = CheckedMachine.COUNTED_NODES

    def __init__(
        self,
        metric: Any = None,
        jobs_at_once: int | None = None,
        poll_seconds: float = 5.0,
        **resources: Any,
    ) -> None:
        super().__init__(metric)
        self._jobs_at_once = jobs_at_once
        self._poll_seconds = poll_seconds
        self._resources = resources

    def engine(self) -> JobEngine:
        from lightning_3d.app.runs.sweep.slurm_engine import SlurmEngine, SlurmResources

        try:
            resources = OmegaConf.to_object(
                OmegaConf.merge(OmegaConf.structured(SlurmResources), self._resources)
            )
        except OmegaConfBaseException as error:
            raise ConfigError(f"hydra.launcher.{explain_value(error)}") from error
        assert isinstance(resources, SlurmResources)
        return SlurmEngine(resources, self._jobs_at_once, poll_seconds=self._poll_seconds)
