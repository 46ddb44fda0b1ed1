"""`hydra/launcher=lightning_3d`: each job of `-m` is a fresh process on this machine.

A launcher is a thin shell around `lightning_3d.runs.sweep`: Hydra's overrides become jobs, outcomes become what sweepers read.
Another way to start jobs is another engine: derive from `SweepLauncher`, and give the class a file in `conf/hydra/launcher`.
"""

from __future__ import annotations

from typing import Any

from lightning_3d.runs.sweep.hydra_launcher import SweepLauncher
from lightning_3d.runs.sweep.local_engine import Engine, LocalEngine


class Lightning3DLauncher(SweepLauncher):
    """Jobs run on this machine.

    Args:
        jobs_at_once: jobs that run at the same time; None is all.
    """

    def __init__(self, metric: Any = None, jobs_at_once: int | None = 1) -> None:
        super().__init__(metric)
        self._jobs_at_once = jobs_at_once

    def engine(self) -> Engine:
        return LocalEngine(self._jobs_at_once)
