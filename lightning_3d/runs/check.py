"""The check of a composed configuration, on the machine that runs it or on another. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from lightning_3d.config.compose import plain
from lightning_3d.config.plan_run import RunPlan, plan_run
from lightning_3d.errors import ConfigError
from lightning_3d.planner.advice import Advice
from lightning_3d.ranks.environment import OutsideRank


def check(config: DictConfig, outside: OutsideRank | None) -> RunPlan:
    """`plan_run`, and what only Hydra knows: a group that was given several names."""
    for override in OmegaConf.select(config, "hydra.overrides.task") or ():
        if override.startswith("parallelism=["):
            raise ConfigError(f"{override} names several layouts; a run has one. Use -m parallelism=A,B to run each.")
    return plan_run(config, outside, Advice())


def check_anywhere(overrides: Sequence[str]) -> tuple[dict[str, Any], RunPlan]:
    """The configuration of a job that this machine looks at and does not run, complete and found right.

    Neither the job's machines nor its data need to be there.

    Raises:
        Lightning3DError: as `lightning-3d train trainer.dry=true`.
    """
    from lightning_3d.config.compose import compose

    config = copy.deepcopy(compose(overrides))
    with read_write(config), open_dict(config):
        if config.get("trainer") is not None:
            config.trainer.dry = True
        config.run_folder = ""  # nothing is written
        if config.get("data") is not None and config.data.get("name") is not None:
            _leave_out_files(config.data)
    plan = check(config, None)
    return plan.freeze(plain(config)), plan


def _leave_out_files(data: Any) -> None:
    """Of data only shapes are needed; what must be named and is not stays unnamed."""
    for key in OmegaConf.missing_keys(data):  # with the name of the group in front
        data[key.rpartition(".")[2]] = None
