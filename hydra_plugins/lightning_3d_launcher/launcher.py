"""`hydra/launcher=lightning_3d`: each job of `-m` is a fresh process on this machine.

A launcher is a thin layer over `lightning_3d.app.runs.sweep`, which turns Hydra's overrides into
jobs and outcomes into results for sweepers. To start jobs in another way, write another engine:
derive from `SweepLauncher`, and give the class a file in `conf/hydra/launcher`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_3d.app.runs.sweep.hydra_launcher import SweepLauncher

if TYPE_CHECKING:
    from lightning_3d.app.runs.sweep.local_engine import JobEngine


class Lightning3DLauncher(SweepLauncher):
    """Launcher that runs jobs on this machine.

    Args:
        metric: see `SweepLauncher`.
        jobs_at_once: number of jobs that run at the same time; None: all.
    """

    def __init__(self, metric: Any = None, jobs_at_once: int | None = 1) -> None:
        super().__init__(metric)
        self._jobs_at_once = jobs_at_once

    def engine(self) -> JobEngine:
        from lightning_3d.app.runs.sweep.local_engine import LocalEngine

        return LocalEngine(self._jobs_at_once)
