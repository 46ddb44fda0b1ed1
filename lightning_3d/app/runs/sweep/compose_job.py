"""Compose a job of a sweep from its overrides with Hydra. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import CompactHydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_3d.app.config.compose import hydra_config, plain
from lightning_3d.app.config.explain import explain, is_composition_error
from lightning_3d.app.config.plan_run import RunPlan
from lightning_3d.app.runs.folder import CONFIG_FILE
from lightning_3d.app.runs.sweep.jobs import Checked, Entry, SkippedJob, SweepJob
from lightning_3d.app.runs.wandb_access import SWEEP_VARIABLE
from lightning_3d.errors import Lightning3DError

Check = Callable[[DictConfig], RunPlan]
"""Checks a composed configuration and returns the plan of its run; raises Lightning3DError for one
that cannot run."""

_OF_THE_SWEEP = (
    "hydra.mode",
    "hydra.output_subdir",
    "hydra.run.dir",
    "hydra.sweep",
    "hydra.launcher",
    "hydra/launcher",
    "hydra/sweeper",
)


class JobFailed(CompactHydraException):
    """Result of a job that failed, for the sweeper. Hydra shows its message without a traceback."""


def swept_overrides(context: HydraContext, config: DictConfig) -> list[str]:
    """List the keys to which the command line or `hydra.sweeper.params` gives several values."""
    overrides = [str(line) for line in OmegaConf.select(config, "hydra.overrides.task") or ()]
    parsed = OverridesParser.create(config_loader=context.config_loader).parse_overrides(overrides)
    keys = [override.get_key_element() for override in parsed if override.is_sweep_override()]
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    return [key.lstrip("+~") for key in [*keys, *(str(key) for key in params)]]


def compose_job(
    context: HydraContext,
    sweep: DictConfig,
    overrides: Sequence[str],
    number: int,
    folder: Path,
    run: Check | Sequence[str],
) -> tuple[Entry, DictConfig | None]:
    """Compose and check a job of a sweep.

    Args:
        context: Hydra's context, which composes.
        sweep: configuration of the whole sweep.
        overrides: overrides of the job.
        number: number of the job.
        folder: folder of the sweep.
        run: the check of a job of `lightning-3d run`; or the command of another app, whose own
            function is run.

    Returns:
        The job, or the reason why it cannot run; and its configuration with Hydra's part, None if
        it does not compose.
    """
    key = tuple(overrides)
    try:
        config = context.config_loader.load_sweep_config(sweep, list(overrides))
        with read_write(config), open_dict(config):
            config.hydra.sweep.dir = str(folder)
            config.hydra.job.num = number
            config.hydra.job.id = str(number)
        with hydra_config(config):
            path = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
            with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
                config.hydra.runtime.output_dir = str(path)
            HydraConfig.instance().set_config(config)
            return _entry(config, key, number, path, run), config
    except Exception as error:
        if not is_composition_error(error):
            raise
        return SkippedJob(number, key, str(explain(error))), None


def _entry(
    config: DictConfig,
    overrides: tuple[str, ...],
    number: int,
    folder: Path,
    run: Check | Sequence[str],
) -> Entry:
    """Make the job of a configuration. Hydra's interpolations in it can be resolved now."""
    if callable(run):
        try:
            plan = run(config)
        except Lightning3DError as error:
            return SkippedJob(number, overrides, str(error))
        if config.trainer.dry:
            return Checked(number, overrides, plan.describe())
        frozen, ranks = plan.freeze(plain(config)), plan.layout.world_size
        command: tuple[str, ...] = (
            sys.executable,
            "-m",
            "lightning_3d",
            "run",
            str(folder / CONFIG_FILE),
        )
    else:
        frozen, ranks = plain(config), 1
        command = (*run, *_own_command(config, folder))
    chdir = folder if config.hydra.job.chdir else None
    environment = {str(name): str(value) for name, value in config.hydra.job.env_set.items()}
    sweep = Path(str(config.hydra.sweep.dir)).absolute()
    environment[SWEEP_VARIABLE] = f"{sweep.parent.name}/{sweep.name}"
    if "WANDB_RUN_GROUP" not in os.environ:
        environment.setdefault("WANDB_RUN_GROUP", environment[SWEEP_VARIABLE])
    return SweepJob(
        number, overrides, folder, frozen, command, ranks, environment, chdir, _hydra_files(config)
    )


def _own_command(config: DictConfig, folder: Path) -> list[str]:
    """Return the arguments with which another Hydra app runs the frozen configuration of a folder
    in that folder."""
    kept = [line for line in config.hydra.overrides.hydra if not line.startswith(_OF_THE_SWEEP)]
    quoted = "'" + str(folder).replace("'", "\\'") + "'"
    # the files of Hydra are there already
    ours = [f"hydra.run.dir={quoted}", "hydra.mode=RUN", "hydra.output_subdir=null"]
    return [f"--config-path={folder}", f"--config-name={CONFIG_FILE}", *kept, *ours]


def _hydra_files(config: DictConfig) -> dict[str, str]:
    """Write the files that Hydra leaves in a run folder: the composed configuration, Hydra's own,
    and the overrides."""
    subdir = config.hydra.output_subdir
    if subdir is None:
        return {}
    own = OmegaConf.masked_copy(config, ["hydra"])
    with read_write(own), read_write(own.hydra), open_dict(own.hydra):
        for name in ("help", "hydra_help"):
            own.hydra.pop(name, None)
    return {
        f"{subdir}/config.yaml": OmegaConf.to_yaml(task_config(config)),
        f"{subdir}/hydra.yaml": OmegaConf.to_yaml(own),
        f"{subdir}/overrides.yaml": OmegaConf.to_yaml(config.hydra.overrides.task),
    }


def task_config(config: DictConfig) -> DictConfig:
    """Return the configuration that a job's function sees, without Hydra's part."""
    return OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
